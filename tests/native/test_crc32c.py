from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import crc32c
from tests.helpers.native_testing import (
    InstructionSet,
    crc32c_by,
    crc32c_combine,
    crc32c_widths,
)

DATA = np.random.default_rng(3).integers(0, 256, 70_000, dtype=np.uint8)
WIDTHS = crc32c_widths()


def checksum(data: bytes, value: int = 0) -> int:
    array = np.frombuffer(data, np.uint8)
    return crc32c(array.ctypes.data, len(data), value)


def part(first: int, last: int, value: int, width: int) -> int:
    """Return the checksum of a part of ``DATA``."""
    return crc32c_by(DATA.ctypes.data + first, last - first, value, width)


def bitwise(data: bytes) -> int:
    """Return the checksum by its definition, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_against_the_definition(instruction_set: InstructionSet) -> None:
    """The check value, and lengths and offsets around the sizes of the loops, whole and in two pieces, are right."""
    assert (checksum(b""), checksum(b"123456789")) == (0, 0xE3069283)
    data = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tobytes()
    for offset in (0, 1, 3, 7):
        for numel in (1, 7, 8, 9, 255, 767, 768, 769, 3000, 12_287, 12_288, 12_289, 13_100):
            piece, cut = data[offset : offset + numel], numel // 3
            assert checksum(piece) == checksum(piece[cut:], checksum(piece[:cut])) == bitwise(piece)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_each_length(width: int) -> None:
    """Every width agrees with the table for each length and alignment."""
    for numel in [*range(1200), *range(1200, 4000, 37)]:
        first = numel % 64
        assert part(first, first + numel, numel, width) == part(first, first + numel, numel, 0)


@pytest.mark.parametrize("width", WIDTHS[1:])
@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=6), value=st.integers(0, 2**32 - 1))
def test_any_pieces(width: int, cuts: list[int], value: int) -> None:
    """Every width agrees with the table however the data is cut, and for any initial value."""
    borders = sorted([*cuts, 0, len(DATA)])
    crc = value
    for first, last in itertools.pairwise(borders):
        crc = part(first, last, crc, width)
    assert crc == part(0, len(DATA), value, 0)


@given(sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=4))
def test_pieces_combine(sizes: list[int]) -> None:
    """The checksums of pieces, some of them empty, combine to that of the whole."""
    ends = list(itertools.accumulate(sizes, initial=0))
    combined = 0
    for first, last in itertools.pairwise(ends):
        combined = crc32c_combine(combined, part(first, last, 0, 0), last - first)
    assert combined == part(0, ends[-1], 0, 0)
