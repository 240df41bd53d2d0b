"""CRC-32C checksums of blocks of the values in a checkpoint.

A file of ``torch.save`` has one checksum of each tensor, which cannot verify the part that one rank reads. A universal
checkpoint has a file of block checksums; for an ordinary checkpoint they are computed when its files are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CheckpointError

__all__ = ["CHECKSUMMED", "CHECKSUMS_NAME", "BlockChecksums", "Checksums", "SavedArray", "VerifiedBlocks"]

CHECKSUMS_NAME = "crc32c.pt"
"""File in ``zero/``: for each file below it, by relative path, a tensor of the checksums of its blocks in order."""

CHECKSUMMED = "smart_infinity_checksums"
"""Key in ``optimizer_state.pt``: the folder was written with that file. DeepSpeed's folders lack both."""

_BLOCK_NUMEL = 1 << 16
_NUM_KEPT = 64  # blocks in memory: 16 MiB


class SavedArray(NamedTuple):
    """A run of fp32 values in a file.

    Args:
        file: Name of the file in the checkpoint, the same on all ranks.
        name: Name of the optimizer's array.
    """

    file: str
    name: str


Checksums = Mapping[SavedArray, Sequence[int]]
"""The checksums of every array's blocks, in order."""


class BlockChecksums:
    """Computes the checksums of the blocks of fp32 values that are added in consecutive parts.

    Attributes:
        values: The checksums so far; the last one may cover only the first part of its block.
    """

    def __init__(self) -> None:
        self.values: list[int] = []
        self._missing = 0  # elements that the last block still lacks

    def add(self, part: NDArray[np.float32]) -> None:
        """Add the next values, which must be contiguous in memory."""
        while part.size:
            if self._missing == 0:
                self.values.append(0)
                self._missing = _BLOCK_NUMEL
            now = part[: self._missing]
            self.values[-1] = native.crc32c(now.ctypes.data, now.nbytes, self.values[-1])
            self._missing -= now.size
            part = part[now.size :]


class VerifiedBlocks:
    """Reads saved arrays block by block, and compares each block with its checksum. The latest blocks stay in memory.

    Args:
        read: Function that returns a copy of elements ``[begin, end)`` of an array, cut at the array's end.
        checksums: The checksums; None if the checkpoint has none, and blocks are not verified.
        folder: The folder with the files, for the error.
        remedy: Remedy for a damaged file, for the error.
    """

    def __init__(
        self,
        read: Callable[[SavedArray, int, int], NDArray[np.float32]],
        checksums: Checksums | None,
        *,
        folder: Path,
        remedy: str,
    ) -> None:
        self._read = read
        self._checksums = checksums
        self._folder = folder
        self._remedy = remedy
        # A cache of this object: one that decorates the method would be shared, and keep all objects in memory.
        self._block = lru_cache(_NUM_KEPT)(self._verified)

    def copy(self, array: SavedArray, begin: int, values: NDArray[np.float32]) -> None:
        """Fill ``values`` with consecutive elements of an array.

        Args:
            array: The array.
            begin: Index of the first element.
            values: Array to fill.

        Raises:
            CheckpointError: A checksum is wrong or missing.
        """
        while values.size:
            index, skipped = divmod(begin, _BLOCK_NUMEL)
            part = self._block(array, index)[skipped : skipped + values.size]
            assert part.size, "the caller knows how many elements an array has"
            values[: part.size] = part
            begin, values = begin + part.size, values[part.size :]

    def _verified(self, array: SavedArray, index: int) -> NDArray[np.float32]:
        first = index * _BLOCK_NUMEL
        block = self._read(array, first, first + _BLOCK_NUMEL)
        if self._checksums is not None:
            found = BlockChecksums()
            found.add(block)
            if found.values != list(self._checksums.get(array, ())[index : index + 1]):
                raise CheckpointError(
                    f"{self._folder / array.file} is damaged: the checksum of a block of {array.name!r} from value "
                    f"{first} on is wrong.",
                    self._remedy,
                )
        return block
