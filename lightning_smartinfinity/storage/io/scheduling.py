"""One I/O scheduler per device that this process uses, for all kinds of data."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_smartinfinity import native

__all__ = ["IoWait", "io_waits", "scheduler_of", "share_devices"]

_schedulers: dict[int, native.IoScheduler] = {}  # by st_dev
# In a forked child, a lock that the parent held at the fork would stay locked for ever.
os.register_at_fork(after_in_child=_schedulers.clear)


_num_processes = 1


@dataclass(frozen=True, slots=True)
class IoWait:
    """Requests of one class that waited for requests of a class on the same device, since the process began.

    Args:
        waiting: The class that waited: ``"awaited"``, ``"gather"``, ``"state"``, ``"write_behind"`` or
            ``"background"``.
        other: The class that it waited for.
        requests: Number of requests that waited.
        nbytes: Bytes of the other class that were transferred meanwhile.
        seconds: Waiting time, divided among the other classes in proportion to their bytes.
    """

    waiting: str
    other: str
    requests: int
    nbytes: int
    seconds: float


def scheduler_of(descriptor: int) -> native.IoScheduler:
    """Return the scheduler of the device that holds an open file or folder."""
    device = os.fstat(descriptor).st_dev
    if device not in _schedulers:
        _schedulers.setdefault(device, native.IoScheduler(num_processes=_num_processes))
    return _schedulers[device]


def share_devices(num_processes: int) -> None:
    """Limit this process to an equal share of the bytes that processes of this machine may have in flight on a device.

    Args:
        num_processes: Number of these processes. Devices already in use keep their share.
    """
    global _num_processes
    _num_processes = num_processes


def io_waits() -> list[IoWait]:
    """Return how classes waited for each other on this process's devices: a row per device and pair of classes."""
    return [IoWait(*wait) for scheduler in list(_schedulers.values()) for wait in scheduler.waits()]
