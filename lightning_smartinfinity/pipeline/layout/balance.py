"""Computes from measured bandwidth how many tasklets each storage folder should have: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.devices.base import FolderTraffic
from lightning_smartinfinity.storage.spread import apportion

__all__ = ["Balance"]

_OLD_WEIGHT = 0.5  # weight of earlier measurements: a folder that slows down is noticed in a few steps
_MIN_SPEEDUP = 1.1  # least speedup worth a move: two disks of one model never measure exactly the same


class Balance:
    """Measures the storage folders' bandwidths: bytes moved over busy time, newer steps weighing more.

    A folder's bandwidth does not depend on its load: a folder that waits for others is not busy.

    Args:
        num_folders: Number of storage folders.
    """

    def __init__(self, num_folders: int) -> None:
        self._moved = np.zeros(num_folders)
        self._seconds = np.zeros(num_folders)
        self._before: Sequence[FolderTraffic] = ()

    def begin(self, counters: Sequence[FolderTraffic]) -> None:
        """Start a measurement at these cumulative counters."""
        self._before = counters

    def end(self, counters: Sequence[FolderTraffic]) -> None:
        """End the measurement at these counters. It counts only if every folder has moved something."""
        changes = [after - before for after, before in zip(counters, self._before, strict=True)]
        moved = np.array([change.read_bytes + change.write_bytes for change in changes], np.float64)
        seconds = np.array([change.busy_seconds for change in changes])
        if moved.all() and seconds.all():
            self._moved = _OLD_WEIGHT * self._moved + moved
            self._seconds = _OLD_WEIGHT * self._seconds + seconds

    def better(self, counts: Sequence[int]) -> NDArray[np.int64] | None:
        """Return the folders' numbers of tasklets in proportion to bandwidth, if a step would become clearly faster.

        Args:
            counts: Present number of tasklets of each folder.

        Returns:
            int64[num_folders] with the same sum; None means to keep the present numbers.
        """
        if not self._moved.all():
            return None
        bandwidths = self._moved / self._seconds
        wanted = apportion(bandwidths.tolist(), sum(counts))
        now, then = (np.max(numbers / bandwidths) for numbers in (np.asarray(counts), wanted))
        return wanted if now > _MIN_SPEEDUP * then else None
