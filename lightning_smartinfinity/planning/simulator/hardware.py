"""Figures of a simulated machine: devices, the channel that they share, the GPU and the host.

The published values, with their sources, are in :data:`FIGURES`; ``planning/paper/fit.py`` fits the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_smartinfinity.settings.rules import FLAG, Rule, between, instance, number, optional, require

__all__ = ["COUNT", "FIGURES", "MOST_DEVICES", "Channel", "Device", "Figure", "Gpu", "Host", "Machine"]

MOST_DEVICES = 1024
"""Largest number of devices in a machine."""

COUNT = between(1, 1_000_000)
"""A number of parts of a machine."""

_LEAST_SECONDS, _MOST_SECONDS = 1e-18, 1e6
_RATE = number(1.0, 1e18)
"""Bytes per second, within limits that keep rounding errors in sums of times small."""
_NO_SECONDS, _SOME_SECONDS = number(0, 0), number(_LEAST_SECONDS, _MOST_SECONDS)
_SECONDS = Rule(
    f"Pass 0, or a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}",
    lambda value: _NO_SECONDS.holds(value) or _SOME_SECONDS.holds(value),
)
"""Seconds per parameter."""


@dataclass(frozen=True)
class Figure:
    """A figure of the hardware.

    Args:
        value: Value for the simulation.
        unit: Unit of the value.
        source: Source of the value, and the range found there.
    """

    value: float
    unit: str
    source: str


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "read": Figure(2.8e9, "B/s", "SSD to FPGA of a SmartSSD, figure, 2.8 to 3.2 GB/s"),
        "write": Figure(1.62e9, "B/s", "FPGA to SSD of a SmartSSD, figure, 1.5 to 1.7 GB/s"),
        "kernel": Figure(8.2e9, "B/s", "Adam kernel, figure, of 16 B per parameter"),
        "sparse_kernel": Figure(
            6.9e9,
            "B/s",
            "fitted beforehand, to the paper's scaling runs of SU+O+C; the figure of the kernel alone shows 2.9",
        ),
    }
)
"""Figures of one device, as published. ``sparse_kernel`` is not from the paper: it was fitted to the SU+O+C runs over 1
to 10 devices, so simulating these runs is no independent test. ``planning/paper/paper.py`` has the paper's own figure,
``SPARSE_KERNEL_SHOWN``."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A storage device, which may have an accelerator.

    Args:
        read: Bytes per second from the SSD to the accelerator or the channel, if the SSD does nothing else.
        write: Bytes per second to the SSD, if it does nothing else.
        duplex: Whether the SSD reads and writes at the same time at full rates; if not, both share its time.
        kernel: Bytes of fp32 arrays and gradient per second of the accelerator; ``None`` if there is no accelerator.
        sparse_kernel: The same rate if the accelerator scatters a sparse gradient; ``None`` means ``kernel``.
        depth: Number of requests that the device processes at the same time; further requests wait in order.
    """

    read: float
    write: float
    duplex: bool = False
    kernel: float | None = None
    sparse_kernel: float | None = None
    depth: int = 64

    def __post_init__(self) -> None:
        kernel = optional(_RATE)
        require(self, read=_RATE, write=_RATE, duplex=FLAG, kernel=kernel, sparse_kernel=kernel, depth=COUNT)

    @classmethod
    def published(cls, *, duplex: bool) -> Device:
        """Return a device with the :data:`FIGURES`, which do not include ``duplex``."""
        rates: dict[str, Any] = {name: figure.value for name, figure in FIGURES.items()}
        return cls(duplex=duplex, **rates)


@dataclass(frozen=True, kw_only=True)
class Channel:
    """The channel to the host that all devices share; rates are in bytes per second.

    Args:
        down: Rate from the host.
        up: Rate to the host.
        together: Rate of both directions together; ``None`` if the directions are independent.
    """

    down: float
    up: float
    together: float | None = None

    def __post_init__(self) -> None:
        require(self, down=_RATE, up=_RATE, together=optional(_RATE))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Seconds of the GPU per parameter of the model.

    Args:
        forward: Seconds of forward, including the transfer of the parameters.
        backward: Seconds of backward, without storing gradients.
        top_k: Seconds to select, in backward, the elements that a sparse gradient keeps.
    """

    forward: float
    backward: float
    top_k: float = 0.0

    def __post_init__(self) -> None:
        require(self, forward=_SECONDS, backward=_SECONDS, top_k=_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Seconds of the CPU per parameter.

    Args:
        update: Seconds of one update thread to verify, update and seal the parameter's state.
        receive: Seconds to convert and copy the parameter after an accelerator has updated it.
        select: Seconds of one core to compress the parameter's gradient, if the GPU does not.
        cores: Number of cores that compress, each a different tasklet.
        feed_back: Seconds of all threads together to store the parameter's residual, at the end of the update.
    """

    update: float = 0.0
    receive: float = 0.0
    select: float = 0.0
    cores: int = 1
    feed_back: float = 0.0

    def __post_init__(self) -> None:
        require(self, update=_SECONDS, receive=_SECONDS, select=_SECONDS, cores=COUNT, feed_back=_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host with identical storage devices.

    Args:
        num_devices: Number of storage devices.
    """

    device: Device
    num_devices: int
    channel: Channel
    gpu: Gpu
    host: Host

    def __post_init__(self) -> None:
        require(
            self,
            device=instance(Device),
            num_devices=between(1, MOST_DEVICES),
            channel=instance(Channel),
            gpu=instance(Gpu),
            host=instance(Host),
        )
