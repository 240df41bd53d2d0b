"""Inspects a model and a machine for a plan: counts on fake tensors, reads free resources, and measures rates.

::

    models     sizes of a model, from a folder, a class or a number
    passes     memory and operations of a forward and backward, counted on fake tensors
    resources  GPU, host memory, cores and drive of this machine
    rates      seconds of real layers, of memory copies and of the drive

Only ``rates`` allocates memory for a model: 1 GB for parameters, or three of its layers, and as much for gradients.
"""
