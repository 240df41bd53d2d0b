"""Checksums of blocks of values, and of data that several processes hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import BlockChecksums, SavedArray, VerifiedBlocks
from lightning_smartinfinity.zero3.engine.record import crc32c_of_both

BLOCK = 65536
ARRAY = SavedArray("weight/fp32.pt", "fp32")


def checksums_of(values: np.ndarray, part: int) -> list[int]:
    checksums = BlockChecksums()
    for begin in range(0, len(values), part):
        checksums.add(values[begin : begin + part])
    return checksums.values


def test_parts_of_any_length_have_the_same_checksums() -> None:
    """Checksums of zeros are known: of a block, and of the rest of one."""
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 77, np.float32)
    assert checksums_of(values, 1000) == checksums_of(values, BLOCK) == checksums_of(values, len(values))
    assert len(checksums_of(values, 12345)) == 3
    assert checksums_of(np.zeros(8, np.float32), 3) == [0x8A9136AA]  # RFC 3720, B.4: 32 bytes of zeros


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (5, BLOCK), (BLOCK - 1, BLOCK + 1), (3, 2 * BLOCK + 77)])
def test_any_part_is_verified(begin: int, end: int) -> None:
    """The part is copied as it is; a bit that was flipped within its blocks raises with the file's name."""
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 77, np.float32)
    checksums = checksums_of(values, 4096)

    def read(checksums: list[int]) -> bytes:
        copy = np.empty(end - begin, np.float32)
        saved = {ARRAY: checksums}
        blocks = VerifiedBlocks(
            lambda array, begin, end: values[begin:end].copy(), saved, folder=Path("zero"), remedy="Convert it again."
        )
        blocks.copy(ARRAY, begin, copy)
        return copy.tobytes()

    assert read(checksums) == values[begin:end].tobytes()
    values.view(np.uint32)[end - 1] ^= 1
    with pytest.raises(CheckpointError, match=r"zero/weight/fp32\.pt is damaged"):
        read(checksums)
    with pytest.raises(CheckpointError, match="is damaged"):
        read([])


@pytest.mark.parametrize("borders", [[], [0, 1], [777, 777, 4999]])
def test_parts_have_the_checksum_of_the_whole(borders: list[int]) -> None:
    """However data is cut, the checksums of its parts combine to that of the whole; empty parts count for nothing."""
    data, crc = np.random.default_rng(0).integers(0, 256, 5000, np.uint8), 0
    for begin, end in zip([0, *borders], [*borders, len(data)], strict=True):
        part = data[begin:end]
        crc = crc32c_of_both(crc, native.crc32c(part.ctypes.data, len(part), 0), len(part))
    assert crc == native.crc32c(data.ctypes.data, len(data), 0)
