"""Files for a rank's parameters, in folders of their own beside those of the state."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.store.direct import open_state_file
from lightning_smartinfinity.store.extents import BLOCK_BYTES
from lightning_smartinfinity.store.folders import PARAMETERS_NAME, RankFolder, parameter_folder_path
from lightning_smartinfinity.store.os_errors import storage_errors

__all__ = ["ParameterFiles", "Place", "deal", "whole_blocks"]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of one parameter.

    Args:
        file: Index of the storage folder.
        offset: Offset of the first byte, a multiple of the block size.
        nbytes: Size in bytes, whole blocks.
    """

    file: int
    offset: int
    nbytes: int


def whole_blocks(nbytes: int) -> int:
    """Round ``nbytes`` up to whole blocks, which is what direct I/O transfers."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def deal(sizes: Iterable[int], num_files: int) -> list[int]:
    """Return the bytes in each file for parameters of these sizes: each goes to the file that is shortest so far."""
    totals = [0] * num_files
    for nbytes in sizes:
        totals[_least(totals)] += whole_blocks(nbytes)
    return totals


class ParameterFiles:
    """``<storage>/<job>/parameters-<n>/`` in every storage folder, owned (locked) by this process until :meth:`close`.

    The files do not outlive the process: those of a killed process are deleted by the next one.

    Args:
        folders: Storage folders, created where missing; one file each.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        direct_io: ``TransferConfig.direct_io``.

    Raises:
        StorageLockedError: Another process owns one of the folders.
        StorageError: A folder cannot be used.

    Attributes:
        files: The file of each storage folder.
    """

    def __init__(self, folders: Sequence[Path], *, job: str, rank: int, direct_io: str) -> None:
        with ExitStack() as undo:
            claimed = []
            for folder in folders:
                path = parameter_folder_path(Path(os.path.abspath(folder)), job=job, rank=rank)
                claimed.append(RankFolder(path, create=True))
                undo.callback(claimed[-1].discard)
            for owned in claimed:
                owned.remove_leftover()
            paths = [owned.allocate(PARAMETERS_NAME, 0) for owned in claimed]
            self.files = tuple(open_state_file(owned.inside, PARAMETERS_NAME, direct_io) for owned in claimed)
            undo.pop_all()
        self._folders = tuple(claimed)
        self._paths = paths
        self._sizes = [0] * len(paths)
        self._free: defaultdict[int, list[Place]] = defaultdict(list)
        self._taken_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of the places in use."""
        return self._taken_bytes

    def allocate(self, nbytes: int) -> Place:
        """Find room for one parameter, with its blocks reserved.

        Raises:
            StorageFullError: There is too little space.
            StorageError: The file cannot be extended.
        """
        nbytes = whole_blocks(nbytes)
        # A model that is built again has parameters of the same sizes as before, so freed places fit exactly.
        place = self._free[nbytes].pop() if self._free[nbytes] else self._extend(nbytes)
        self._taken_bytes += nbytes
        return place

    def free(self, place: Place) -> None:
        """Free a place for a later parameter of the same size."""
        self._taken_bytes -= place.nbytes
        self._free[place.nbytes].append(place)

    def close(self) -> None:
        """Close, delete and unlock; idempotent."""
        for file in self.files:
            file.close()
        for folder in self._folders:
            folder.close(remove=True)
        self._folders = ()

    def _extend(self, nbytes: int) -> Place:
        file = _least(self._sizes)
        offset, path = self._sizes[file], self._paths[file]
        with storage_errors(f"Allocating {nbytes} bytes at offset {offset} of", path):
            descriptor = self._folders[file].inside.open(PARAMETERS_NAME, os.O_RDWR)
            try:
                os.posix_fallocate(descriptor, offset, nbytes)
            finally:
                os.close(descriptor)
        self._sizes[file] += nbytes
        return Place(file, offset, nbytes)


def _least(totals: Sequence[int]) -> int:
    return min(range(len(totals)), key=totals.__getitem__)
