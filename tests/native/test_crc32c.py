from __future__ import annotations

import numpy as np
import pytest

from lightning_smartinfinity.native import (
    InstructionSet,
    crc32c,
    select_instruction_set,
    supported_instruction_sets,
)


def checksum(data: bytes, value: int = 0) -> int:
    array = np.frombuffer(data, np.uint8)
    return crc32c(array.ctypes.data, len(data), value)


def bitwise(data: bytes) -> int:
    """The definition, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
    ids=["empty", "digits", "zeros", "ones", "ascending", "descending"],
)
def test_known_vectors(instruction_set: InstructionSet, data: bytes, expected: int) -> None:
    """The check value of the algorithm and the vectors of RFC 3720."""
    assert checksum(data) == expected


def test_against_the_definition(instruction_set: InstructionSet) -> None:
    """Lengths and offsets around words and stretches give what the definition gives."""
    data = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tobytes()
    for offset in (0, 1, 3, 7):
        for numel in (1, 7, 8, 9, 255, 767, 768, 769, 3000, 12_287, 12_288, 12_289, 13_100):
            assert checksum(data[offset : offset + numel]) == bitwise(data[offset : offset + numel])


def test_continues(instruction_set: InstructionSet) -> None:
    """The checksum of two pieces in a row is that of the whole."""
    data = np.random.default_rng(1).integers(0, 256, 30_000, dtype=np.uint8).tobytes()
    for cut in (0, 1, 777, 12_288, 29_999, 30_000):
        assert checksum(data[cut:], checksum(data[:cut])) == checksum(data)


def test_table_and_instruction_agree_on_large_data() -> None:
    """Several megabytes give one checksum whatever computes it."""
    data = np.random.default_rng(2).integers(0, 256, (5 << 20) + 13, dtype=np.uint8).tobytes()
    found = set()
    for choice in supported_instruction_sets():
        select_instruction_set(choice)
        found.add(checksum(data))
    assert len(found) == 1
