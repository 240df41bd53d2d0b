"""The checksum of data that several processes hold is that of the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity import native
from lightning_smartinfinity.zero3.engine.record import crc32c_of_both


def crc32c(data: bytes) -> int:
    values = np.frombuffer(data or b"\0", np.uint8)
    return native.crc32c(values.ctypes.data, len(data), 0)


@given(st.lists(st.binary(max_size=5000), max_size=5))
def test_parts_and_the_whole(parts: list[bytes]) -> None:
    """However data is cut, its parts have the checksum of the whole; empty parts count for nothing."""
    crc = 0
    for part in parts:
        crc = crc32c_of_both(crc, crc32c(part), len(part))
    assert crc == crc32c(b"".join(parts))
