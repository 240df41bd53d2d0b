"""One scheduler of I/O for each device that this process uses, whatever is stored there."""

from __future__ import annotations

import os

from lightning_smartinfinity import native

__all__ = ["scheduler_of"]

_schedulers: dict[int, native.IoScheduler] = {}  # by st_dev
# A lock of the parent's may be held for ever in a forked child.
os.register_at_fork(after_in_child=_schedulers.clear)


def scheduler_of(descriptor: int) -> native.IoScheduler:
    """Return the scheduler of the device on which an open file or folder lies."""
    device = os.fstat(descriptor).st_dev
    if device not in _schedulers:
        _schedulers[device] = native.IoScheduler()
    return _schedulers[device]
