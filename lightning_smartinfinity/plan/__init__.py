"""What a step takes before it is run: steps of this package, of the published handler and of ZeRO-Infinity in virtual
time, the paper's tables, and a cost model.

::

    virtual_time   processes, and resources that they share
    machine        devices, channel, GPU, host          workload, gradients   what is updated
    wiring         paths over a machine's resources
    schedule_run   the native core's TransferSchedule in virtual time
    handler        our update on it                     published             SmartUpdate, ZeRO-Infinity
    systems        whoever updates                      step                  a whole step of any of them
    paper          its tables as data                   fit, reproduction     the same numbers, simulated
    cost           whether compression gains

Numbers only: no torch, no I/O. What is simulated is what runs: tasklets are those of ``transfer.layout``, and the state
machine that orders them is the one that orders real steps.
"""
