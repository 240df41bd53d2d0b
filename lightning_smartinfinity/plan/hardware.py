"""What is simulated: devices, the channel that they share, the GPU and the host. Figures only; who states them is said
where they are (:mod:`~lightning_smartinfinity.plan.paper`, :mod:`~lightning_smartinfinity.plan.fit`).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_smartinfinity.checks import FLAG, Rule, between, instance, number, optional, require

__all__ = ["COUNT", "MOST_DEVICES", "Channel", "Device", "Gpu", "Host", "Machine"]

MOST_DEVICES = 1024
"""Storage devices of a machine."""

COUNT = between(1, 1_000_000)
"""A number of parts of a machine."""

_LEAST_SECONDS, _MOST_SECONDS = 1e-18, 1e6
_RATE = number(1.0, 1e18)
"""Bytes per second: no resource is so slow or so fast that a sum of times loses it."""
_NO_SECONDS, _SOME_SECONDS = number(0, 0), number(_LEAST_SECONDS, _MOST_SECONDS)
_SECONDS = Rule(
    f"Pass 0, or a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}",
    lambda value: _NO_SECONDS.holds(value) or _SOME_SECONDS.holds(value),
)
"""Seconds per parameter."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device with storage, and perhaps an accelerator beside it.

    Args:
        read: SSD to accelerator, or to the channel: bytes per second of a device that does nothing else.
        write: The other way.
        duplex: Reads and writes run side by side at their full rates; else they share the SSD's time.
        kernel: Of the accelerator: bytes of arrays and gradient, in fp32, per second; None: there is none.
        sparse_kernel: The same with elements of a gradient that it scatters; None: as ``kernel``.
        depth: Requests that it works side by side; further ones wait in their order.
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


@dataclass(frozen=True, kw_only=True)
class Channel:
    """What all devices share on their way to the host, in bytes per second.

    Args:
        down: From the host.
        up: To the host.
        together: Of both directions; None: each for itself.
    """

    down: float
    up: float
    together: float | None = None

    def __post_init__(self) -> None:
        require(self, down=_RATE, up=_RATE, together=optional(_RATE))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Seconds per parameter of the model.

    Args:
        forward: With what it takes to bring the parameters.
        backward: Without what it takes to store gradients.
        top_k: Of choosing what a sparse gradient keeps, in backward.
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
        update: Verifying, updating and sealing it by one thread of this package.
        receive: Converting and copying it after an accelerator has updated it.
        select: Making a compressed gradient by one core, where the GPU does not.
        cores: That do, each for one tasklet.
        feed_back: Keeping what was not sent, by all threads that do; after the update, beside nothing else of it.
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
    """A host with storage devices that are all alike.

    Args:
        num_devices: How many.
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
