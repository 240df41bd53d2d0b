"""Numbers of places in the state files. Files grow between generations, so that no step meets a full disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.storage.extents import ExtentMap
from lightning_smartinfinity.storage.folders.rank_folder import STATE_NAME, RankFolder
from lightning_smartinfinity.storage.state.space import has_room

__all__ = ["Capacities"]

_log = logging.getLogger(__name__)


class Capacities:
    """Number of places in each device's state file, as an iterable of ints.

    Args:
        folders: The rank's folders, with their state files.
        extents: The extents of the rank's tasklets.
        ranks: Number of ranks of the job, all of whose files may grow at the same time.
    """

    def __init__(self, folders: Sequence[RankFolder], extents: ExtentMap, *, ranks: int) -> None:
        self._folders = folders
        self._extents = extents
        self._ranks = ranks
        self._has_warned = False
        # A file may have any length: bytes after its last whole place are not used.
        lengths = [folder.size_of(STATE_NAME) for folder in folders]
        self._places = [length // max(1, extents.place_bytes) for length in lengths]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all places together."""
        return self._extents.place_offset(sum(self._places))

    def restore(self, places: Sequence[int]) -> None:
        """Extend each file to at least this many places: files of an earlier process may have been truncated.

        Raises:
            StorageFullError: There is too little space.
            StorageError: A file cannot be extended.
        """
        for device, wanted in enumerate(places):
            if wanted > self._places[device]:
                self._extend(device, wanted)

    def grow(self, places: Sequence[int]) -> bool:
        """Extend each file to at least this many places, if its file system has room for all ranks (``has_room``).

        Returns:
            Whether all files have that many places. If not, the reason is logged once.
        """
        try:
            self.make_room(places)
        except StorageError as error:
            if not self._has_warned:
                _log.warning("Storage folders keep their shares of the optimizer state. %s", error.problem)
            self._has_warned = True
            return False
        return True

    def make_room(self, places: Sequence[int]) -> None:
        """Act as :meth:`grow`, but raise if a file cannot be extended.

        Raises:
            StorageFullError: Less than half of the free space would stay free.
            StorageError: A file cannot be extended.
        """
        for device, wanted in enumerate(places):
            if wanted > self._places[device]:
                self._require_room(device, wanted)
                self._extend(device, wanted)

    def _require_room(self, device: int, places: int) -> None:
        folder, num_bytes = self._folders[device].path, self._extents.place_offset(places - self._places[device])
        if not has_room(folder, num_bytes, ranks=self._ranks):
            raise StorageFullError(
                f"{num_bytes} bytes more in {str(folder)!r}, for each rank, would be over half of the free space.",
                "Free space there to let the state move to the faster folder.",
            )

    def _extend(self, device: int, places: int) -> None:
        self._folders[device].extend(STATE_NAME, self._extents.place_offset(places))
        self._places[device] = places
