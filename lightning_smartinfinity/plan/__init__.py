"""What a step takes before it is run: steps of this package, of the published handler and of ZeRO-Infinity in virtual
time, the paper's tables, and a cost model.

::

    virtual_time   processes, and resources that they share
    hardware       devices, channel, GPU, host          workload, gradients   what is updated
    wiring         paths over a machine's resources
    schedule_run   the native core's TransferSchedule in virtual time
    handler        our update on it                     published             SmartUpdate, ZeRO-Infinity
    systems        whoever updates                      step                  a whole step of any of them
    paper          its tables as data                   fit, reproduction     the same numbers, simulated
    cost           whether compression gains            memory                what an update holds in host memory

Numbers only: no torch, no I/O. What is simulated is what runs: tasklets are those of ``transfer.layout``, and the state
machine that orders them is the one that orders real steps.
"""

from lightning_smartinfinity.plan.cost import CompressionGain, CompressionResources, gain_of
from lightning_smartinfinity.plan.fit import PaperMachine, fit
from lightning_smartinfinity.plan.gradients import BlockScaledPayload, Dense, GradientForm, Pairs, TopKPayload
from lightning_smartinfinity.plan.handler import Route
from lightning_smartinfinity.plan.hardware import Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.plan.memory import host_bytes
from lightning_smartinfinity.plan.step import Overlap, StepTime, System, Traffic, simulate_step
from lightning_smartinfinity.plan.workload import NUM_ARRAYS, Workload

__all__ = [
    "NUM_ARRAYS",
    "BlockScaledPayload",
    "Channel",
    "CompressionGain",
    "CompressionResources",
    "Dense",
    "Device",
    "Gpu",
    "GradientForm",
    "Host",
    "Machine",
    "Overlap",
    "Pairs",
    "PaperMachine",
    "Route",
    "StepTime",
    "System",
    "TopKPayload",
    "Traffic",
    "Workload",
    "fit",
    "gain_of",
    "host_bytes",
    "simulate_step",
]
