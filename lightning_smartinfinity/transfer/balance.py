"""How many tasklets each storage folder should have, by measured bandwidth: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.devices.base import FolderTraffic
from lightning_smartinfinity.store.spread import apportion

__all__ = ["Balance"]

_KEPT = 0.5  # of what was measured before, at each new measurement: a folder that slows down is found in a few steps
_WORTHWHILE = 1.1  # times sooner a step must be done: two disks of one make never measure quite the same


class Balance:
    """Bandwidths of the storage folders: what they moved over the time in which they were busy, newer steps first.

    A folder's bandwidth does not depend on how much it has to do: one that waits for others is not busy.

    Args:
        num_folders: Storage folders.
    """

    def __init__(self, num_folders: int) -> None:
        self._moved = np.zeros(num_folders)
        self._seconds = np.zeros(num_folders)
        self._before: Sequence[FolderTraffic] = ()

    def begin(self, counters: Sequence[FolderTraffic]) -> None:
        """What is measured begins; counters are cumulative."""
        self._before = counters

    def end(self, counters: Sequence[FolderTraffic]) -> None:
        """It has ended. It counts if every folder has moved something."""
        changes = [after - before for after, before in zip(counters, self._before, strict=True)]
        moved = np.array([change.read_bytes + change.write_bytes for change in changes], np.float64)
        seconds = np.array([change.busy_seconds for change in changes])
        if moved.all() and seconds.all():
            self._moved = _KEPT * self._moved + moved
            self._seconds = _KEPT * self._seconds + seconds

    def better(self, counts: Sequence[int]) -> NDArray[np.int64] | None:
        """Numbers of tasklets in proportion to bandwidth, if a step would be done a good deal sooner with them.

        Args:
            counts: Of each folder now.

        Returns:
            int64[num_folders], as many in sum; None: leave them as they are.
        """
        if not self._moved.all():
            return None
        bandwidths = self._moved / self._seconds
        wanted = apportion(bandwidths.tolist(), sum(counts))
        now, then = (np.max(numbers / bandwidths) for numbers in (np.asarray(counts), wanted))
        return wanted if now > _WORTHWHILE * then else None
