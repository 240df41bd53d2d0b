"""One scheduler of I/O for each device that this process uses, whatever is stored there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_smartinfinity import native

__all__ = ["IoWait", "io_waits", "scheduler_of", "share_devices"]

_schedulers: dict[int, native.IoScheduler] = {}  # by st_dev
# A lock of the parent's may be held for ever in a forked child.
os.register_at_fork(after_in_child=_schedulers.clear)


_num_processes = 1


@dataclass(frozen=True, slots=True)
class IoWait:
    """Requests of one class that waited for those of a class on the same device, since the process began.

    Args:
        waiting: The class that waited: ``"awaited"``, ``"gather"``, ``"state"``, ``"write_behind"`` or
            ``"background"``.
        other: The class that it waited for.
        requests: Number of requests that waited.
        nbytes: Bytes of the other class that were transferred meanwhile.
        seconds: Time of waiting, divided among the other classes in proportion to their bytes.
    """

    waiting: str
    other: str
    requests: int
    nbytes: int
    seconds: float


def scheduler_of(descriptor: int) -> native.IoScheduler:
    """Return the scheduler of the device on which an open file or folder lies."""
    device = os.fstat(descriptor).st_dev
    if device not in _schedulers:
        _schedulers.setdefault(device, native.IoScheduler(num_processes=_num_processes))
    return _schedulers[device]


def share_devices(num_processes: int) -> None:
    """Let this process have an equal share of what processes of this machine may have in flight on a device.

    Args:
        num_processes: Their number. Devices that are in use already keep their share.
    """
    global _num_processes
    _num_processes = num_processes


def io_waits() -> list[IoWait]:
    """Return who waited for whom on the devices of this process: a row for each device and pair of classes."""
    return [IoWait(*wait) for scheduler in list(_schedulers.values()) for wait in scheduler.waits()]
