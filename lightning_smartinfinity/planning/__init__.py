"""Predicts the time and memory of a step, and plans whether a training fits.

It simulates this package, the published handler and ZeRO-Infinity in virtual time, reproduces the paper's tables, and
estimates the gain of compression.

::

    virtual_time     processes, and resources that they share
    hardware         devices, channel, GPU, host          workload, gradients   data of an update
    wiring           paths over a machine's resources
    handler          our update, by the native core's TransferSchedule
    systems          SmartUpdate, ZeRO-Infinity, ours     step                  a step of any system
    paper            the paper's tables as data           fit, reproduction     the same numbers, simulated
    cost             gain of compression                  memory                host memory of an update
    model, training  numbers of a model and a training    needs                 bytes by place, phase and owner
    pace             seconds, hours, a drive's life       choice                settings that fit, alternatives

The package computes with numbers only: no torch, no I/O. It simulates the real code: tasklets come from
``pipeline.layout.partition_layout``, and the state machine that orders them also orders real steps.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.planning.cost import CompressionGain, CompressionResources, gain_of
from lightning_smartinfinity.planning.memory import host_bytes
from lightning_smartinfinity.planning.simulator.gradients import (
    BlockScaledPayload,
    Dense,
    GradientForm,
    Pairs,
    TopKPayload,
)
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.hardware import Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.planning.simulator.step import (
    Overlap,
    SimulatedTraffic as Traffic,
    StepTime,
    System,
    simulate_step,
)
from lightning_smartinfinity.planning.simulator.workload import NUM_ARRAYS, Workload

if TYPE_CHECKING:
    from lightning_smartinfinity.planning.paper.fit import PaperMachine, fit

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


def __getattr__(name: str) -> Any:
    """Import the paper's machine when it is first used: only simulations use it."""
    if name not in ("PaperMachine", "fit"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.paper.fit"), name)
