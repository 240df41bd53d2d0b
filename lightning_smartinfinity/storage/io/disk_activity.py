"""Tells whether a disk still answers, by the kernel's counters of its requests."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DEVICES", "completed_requests", "counters_of"]

DEVICES = Path("/sys/dev/block")
"""Folder with a folder for each block device, partitions included, by its numbers."""

# Fields of the file "stat": completed reads, writes, discards and flushes. Older kernels have fewer.
_COMPLETED = (0, 4, 11, 15)


def counters_of(path: Path, *, devices: Path | None = None) -> Path | None:
    """Return the file with the counters of the device on which a path lies, or will lie once it is made.

    Args:
        path: An absolute path. Asking for its device may take as long as the disk takes to answer.
        devices: Folder of the devices, :data:`DEVICES` by default.

    Returns:
        The file, or None for what has no device of its own, such as tmpfs, overlay, btrfs and network file systems.
    """
    for existing in (path, *path.parents):
        try:
            device = os.stat(existing).st_dev
        except OSError:
            continue
        counters = (devices or DEVICES) / f"{os.major(device)}:{os.minor(device)}" / "stat"
        return counters if completed_requests(counters) is not None else None
    return None


def completed_requests(counters: Path) -> int | None:
    """Return how many requests a device has completed, or None if the file does not tell. Does not wait for it."""
    try:
        fields = [int(field) for field in counters.read_text().split()]
    except (OSError, ValueError):
        return None
    return sum(fields[index] for index in _COMPLETED if index < len(fields)) if fields else None
