"""CRC-32Cs of blocks of the values in a universal checkpoint.

A file of ``torch.save`` has one checksum of all of its values, which tells nothing of the part that a rank reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CheckpointError

__all__ = ["CHECKSUMMED", "CHECKSUMS_NAME", "BlockChecksums", "verified"]

CHECKSUMS_NAME = "crc32c.pt"
"""File in ``zero/``: of each file below it, by its relative path, a tensor of the checksums of its blocks in order."""

CHECKSUMMED = "smart_infinity_checksums"
"""Key in ``optimizer_state.pt`` that says that the folder was written with that file: DeepSpeed's has none."""

_BLOCK_NUMEL = 1 << 16


class BlockChecksums:
    """Computes the checksums of the blocks of fp32 values that arrive in consecutive parts.

    Attributes:
        values: The checksums so far; the last block's may be of its first part.
    """

    def __init__(self) -> None:
        self.values: list[int] = []
        self._missing = 0  # elements of the last block

    def add(self, part: NDArray[np.float32]) -> None:
        """Take the next values, which are contiguous in memory."""
        while part.size:
            if self._missing == 0:
                self.values.append(0)
                self._missing = _BLOCK_NUMEL
            now = part[: self._missing]
            self.values[-1] = native.crc32c(now.ctypes.data, now.nbytes, self.values[-1])
            self._missing -= now.size
            part = part[now.size :]


def verified(
    values: torch.Tensor, begin: int, end: int, checksums: Sequence[int], *, file: Path, remedy: str
) -> NDArray[np.float32]:
    """Return a copy of some values of a mapped file, of whose blocks the copy has the right checksums.

    Args:
        values: All values of the file, flat, in fp32.
        begin: Index of the first value.
        end: Index behind the last value.
        checksums: The checksum of each block of the file.
        file: Path of the file, for the error.
        remedy: Remedy for a damaged file, for the error.

    Raises:
        CheckpointError: A checksum is wrong, or there is another number of them.
    """
    first = begin // _BLOCK_NUMEL * _BLOCK_NUMEL
    copy = np.array(values[first : -(-end // _BLOCK_NUMEL) * _BLOCK_NUMEL].numpy())
    found = BlockChecksums()
    found.add(copy)
    at = first // _BLOCK_NUMEL
    if list(checksums[at : at + len(found.values)]) != found.values:
        raise CheckpointError(f"{file} is damaged: the checksum of a block from value {first} on is wrong.", remedy)
    return copy[begin - first : end - first]
