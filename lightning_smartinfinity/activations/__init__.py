"""Room for activation offload: activations written to storage in forward and read back before backward needs them.

Nothing is built yet. The package sits beside ``zero3``, above ``transfer``, and shares the storage devices with the
optimizer state.
"""
