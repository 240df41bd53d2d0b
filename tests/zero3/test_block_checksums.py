"""Checksums of blocks of values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.block_checksums import BlockChecksums, verified

BLOCK = 65536
FILE = Path("zero/weight/fp32.pt")


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
    """The part is returned as it is; a bit that was flipped within its blocks raises with the file's name."""
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 77, np.float32)
    checksums, tensor = checksums_of(values, 4096), torch.from_numpy(values)

    def read() -> np.ndarray:
        return verified(tensor, begin, end, checksums, file=FILE, remedy="Convert it again.")

    assert read().tobytes() == values[begin:end].tobytes()
    values.view(np.uint32)[end - 1] ^= 1
    with pytest.raises(CheckpointError, match=r"weight/fp32\.pt is damaged"):
        read()
    with pytest.raises(CheckpointError, match="is damaged"):
        verified(tensor, begin, end, [], file=FILE, remedy="Convert it again.")
