"""How many places the state files have. Files grow between generations, so that no step meets a full disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.store.extents import ExtentMap
from lightning_smartinfinity.store.folders import STATE_NAME, RankFolder
from lightning_smartinfinity.store.space import has_room

__all__ = ["Capacities"]

_log = logging.getLogger(__name__)


class Capacities:
    """Places of each device's state file; a sequence of ints.

    Args:
        folders: Of the rank, with their state files.
        extents: Of its tasklets.
        ranks: Of the job, all of which may want to grow at a time.
    """

    def __init__(self, folders: Sequence[RankFolder], extents: ExtentMap, *, ranks: int) -> None:
        self._folders = folders
        self._extents = extents
        self._ranks = ranks
        self._told = False
        # Of whatever length: what follows the last whole place is of no use.
        lengths = [(folder.path / STATE_NAME).stat().st_size for folder in folders]
        self._places = [length // max(1, extents.place_bytes) for length in lengths]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    @property
    def nbytes(self) -> int:
        """Of all places."""
        return self._extents.place_offset(sum(self._places))

    def restore(self, places: Sequence[int]) -> None:
        """Have so many places at least: what an earlier process had allocated may have been cut off.

        Raises:
            StorageFullError: There is too little space.
            StorageError: A file cannot be made longer.
        """
        for device, wanted in enumerate(places):
            if wanted > self._places[device]:
                self._extend(device, wanted)

    def grow(self, places: Sequence[int]) -> bool:
        """Have so many places at least, if that leaves file systems as free as others may want them.

        Returns:
            Whether it does; if not, the log says why, once.
        """
        try:
            for device, wanted in enumerate(places):
                if wanted > self._places[device]:
                    self._require_room(device, wanted)
                    self._extend(device, wanted)
        except StorageError as error:
            if not self._told:
                _log.warning("Storage folders keep their shares of the optimizer state. %s", error.problem)
            self._told = True
            return False
        return True

    def _require_room(self, device: int, places: int) -> None:
        folder, num_bytes = self._folders[device].path, self._extents.place_offset(places - self._places[device])
        if not has_room(folder, num_bytes, ranks=self._ranks):
            raise StorageFullError(
                f"{num_bytes} bytes more in {str(folder)!r}, for each rank, would take more than half of what is free.",
                "Free space there to let the state move to the faster folder.",
            )

    def _extend(self, device: int, places: int) -> None:
        self._folders[device].extend(STATE_NAME, self._extents.place_offset(places))
        self._places[device] = places
