"""What is simulated: devices, the channel that they share, the GPU and the host. Figures only; who states them is said
where they are (:mod:`~lightning_smartinfinity.plan.paper`, :mod:`~lightning_smartinfinity.plan.fit`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_smartinfinity.errors import ConfigError

__all__ = ["Channel", "Device", "Gpu", "Host", "Machine"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device with storage, and perhaps an accelerator beside it.

    Args:
        read: SSD to accelerator, or to the channel: bytes per second of a device that does nothing else.
        write: The other way.
        duplex: Reads and writes run side by side at their full rates; else they share the SSD's time.
        kernel: Of the accelerator: bytes of arrays and gradient, in fp32, per second; None: there is none.
        sparse_kernel: The same with a compressed gradient, which it expands; None: as ``kernel``.
        depth: Requests that it works side by side; further ones wait in their order.
    """

    read: float
    write: float
    duplex: bool = False
    kernel: float | None = None
    sparse_kernel: float | None = None
    depth: int = 64

    def __post_init__(self) -> None:
        _require_positive(self)


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
        _require_positive(self)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Seconds per parameter of the model.

    Args:
        forward: With what it takes to bring the parameters.
        backward: Without what it takes to store gradients.
        top_k: Of choosing what a compressed gradient keeps, in backward.
    """

    forward: float
    backward: float
    top_k: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """Seconds of the CPU per parameter.

    Args:
        update: Verifying, updating and sealing it by one thread of this package.
        receive: Converting and copying it after an accelerator has updated it.
        select: Choosing what a compressed gradient keeps by one core, where the GPU does not.
        cores: That choose, each for one tasklet.
    """

    update: float = 0.0
    receive: float = 0.0
    select: float = 0.0
    cores: int = 1


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
        if self.num_devices < 1:
            raise ConfigError(
                f"Machine(num_devices={self.num_devices}) has no storage device.", "Pass a number from 1 on."
            )


def _require_positive(figures: Device | Channel) -> None:
    for field in fields(figures):
        value = getattr(figures, field.name)
        if value is not None and not isinstance(value, bool) and not 0 < value < float("inf"):
            raise ConfigError(
                f"{type(figures).__name__}({field.name}={value!r}) is out of range.", "Pass a number above 0."
            )
