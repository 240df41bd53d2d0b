"""The kernel's counters of a disk's completed requests, which show whether the disk still answers."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DEVICES", "completed_requests", "counters_of"]

DEVICES = Path("/sys/dev/block")
"""Folder with one folder per block device or partition, named ``<major>:<minor>``."""

# Fields of the file "stat": completed reads, writes, discards and flushes. Older kernels have fewer.
_COMPLETED = (0, 4, 11, 15)


def counters_of(path: Path, *, devices: Path | None = None) -> Path | None:
    """Return the file with the request counters of a path's device. The path need not exist yet.

    Args:
        path: An absolute path. Looking up its device may block until the disk answers.
        devices: Folder of the devices, :data:`DEVICES` by default.

    Returns:
        The file, or None for file systems without their own device, such as tmpfs, overlay, btrfs and network ones.
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
    """Return how many requests a device has completed, or None if unknown. Does not wait for the device."""
    try:
        fields = [int(field) for field in counters.read_text().split()]
    except (OSError, ValueError):
        return None
    return sum(fields[index] for index in _COMPLETED if index < len(fields)) if fields else None
