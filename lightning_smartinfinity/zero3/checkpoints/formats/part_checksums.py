"""CRC-32C checksums of blocks of the bytes of an export, whose windows are written in any order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native

__all__ = ["BLOCK_BYTES", "CHECKSUMS_VERSION", "PartChecksums", "checksums_of", "num_blocks"]

CHECKSUMS_VERSION = 1
"""Version of the format of checksums: in both kinds of exports, and of files that transformers stores."""

BLOCK_BYTES = 4 << 20
"""Bytes of a block: a multiple of every dtype's size."""


def num_blocks(nbytes: int) -> int:
    """Return the number of blocks of a part."""
    return -(-nbytes // BLOCK_BYTES)


def checksums_of(content: Any) -> list[int]:
    """Return the checksums of the blocks of a contiguous buffer of bytes."""
    values = np.frombuffer(content, np.uint8) if len(content) else np.empty(0, np.uint8)
    checksums = PartChecksums(values.size)
    checksums.add(0, values)
    return checksums.values()


class PartChecksums:
    """Computes the CRC-32C of each block of a part whose bytes are added in any order, each once.

    Args:
        nbytes: Number of bytes of the part.

    Attributes:
        nbytes: As passed.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._whole: dict[int, int] = {}
        # Of blocks that are not whole yet: begin and checksum of each piece, by its end within the block.
        self._pieces: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, begin: int, content: NDArray[np.uint8]) -> None:
        """Add consecutive bytes.

        Args:
            begin: Offset of the first byte in the part.
            content: uint8[n], contiguous in memory.
        """
        while content.size:
            index, skipped = divmod(begin, BLOCK_BYTES)
            now = content[: BLOCK_BYTES - skipped]
            self._add(index, skipped, now)
            begin, content = begin + now.size, content[now.size :]

    def _add(self, index: int, begin: int, content: NDArray[np.uint8]) -> None:
        pieces = self._pieces.setdefault(index, {})
        first, before = pieces.pop(begin, (begin, 0))
        pieces[begin + content.size] = first, native.crc32c(content.ctypes.data, content.nbytes, before)
        whole = min(BLOCK_BYTES, self.nbytes - index * BLOCK_BYTES)
        if sum(end - first for end, (first, _) in pieces.items()) == whole:
            self._whole[index] = _joined(self._pieces.pop(index))

    def values(self) -> list[int]:
        """Return the checksums of the blocks in order. All bytes must have been added."""
        assert not self._pieces and len(self._whole) == num_blocks(self.nbytes), "not all bytes were added"
        return [checksum for _, checksum in sorted(self._whole.items())]


def _joined(pieces: Mapping[int, tuple[int, int]]) -> int:
    """Return the checksum of consecutive pieces.

    The checksum is linear: that of two pieces is the second's, and the first's as zeros of the second's size change it.
    """
    checksum = 0
    for end, (begin, own) in sorted(pieces.items()):
        checksum = own if begin == 0 else own ^ _after_zeros(checksum, end - begin) ^ _after_zeros(0, end - begin)
    return checksum


def _after_zeros(checksum: int, nbytes: int) -> int:
    return native.crc32c(_zeros(BLOCK_BYTES).ctypes.data, nbytes, checksum)


@lru_cache(1)
def _zeros(nbytes: int) -> NDArray[np.uint8]:
    return np.zeros(nbytes, np.uint8)
