"""Chooses the threads that update and the buffers of the ring, from cores, drives, tasklets and memory."""

from __future__ import annotations

__all__ = ["DRIVE_BUFFERS", "ring_buffers", "update_threads"]

DRIVE_BUFFERS = 16
"""Buffers of a ring whose tasklets have the default size and are on one drive."""

_MOST_THREADS = 8  # so that a machine with many cores keeps some; not measured with more than two
_DRIVE_BYTES = 64 << 20  # more in flight on one drive only makes urgent requests wait (native/src/io/io_scheduler.hpp)
_FEW_BUFFERS = 8  # with fewer, reads, updates and writes wait for each other
_SHARE_OF_MARGIN = 8  # 1 / _SHARE_OF_MARGIN of the memory that state in memory leaves free


def update_threads(cores: int, *, on_gpu: bool) -> int:
    """Return the number of threads with which a process updates.

    Args:
        cores: Cores of the process.
        on_gpu: Whether a GPU computes forward and backward, and leaves the cores to the update.
    """
    return min(max(1, cores // (2 if on_gpu else 4)), _MOST_THREADS)


def ring_buffers(*, tasklet_bytes: int, threads: int, drives: int, processes: int, margin: int) -> int:
    """Return the number of buffers with which each process keeps its share of the drives busy.

    Args:
        tasklet_bytes: Bytes of a buffer.
        threads: Number of threads that update. Each uses a buffer that is not in flight.
        drives: Number of drives of the machine that hold its state.
        processes: Number of processes of the machine, which share the drives.
        margin: Bytes of memory that state in memory leaves free, in all processes of the machine together.
    """
    of_drive = min(max(_FEW_BUFFERS, _DRIVE_BYTES // tasklet_bytes), DRIVE_BUFFERS)
    wanted = of_drive * -(-drives // processes) + threads - 1
    return max(_FEW_BUFFERS, min(wanted, margin // _SHARE_OF_MARGIN // processes // tasklet_bytes))
