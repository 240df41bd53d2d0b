"""Tests the tables of the FPGA's resources that the kernels should take."""

from __future__ import annotations

from functools import reduce
from operator import xor
from pathlib import Path

import numpy as np

from hls.resources import beat_columns, report
from lightning_smartinfinity import native

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_what_the_script_prints() -> None:
    assert report() in (ROOT / "docs/smartssd_kernels.md").read_text()


def test_networks_compute_the_checksum() -> None:
    """The counted columns give the CRC-32C of a beat: those of its set bits, with the register in the first word."""
    columns = beat_columns()
    beat = np.random.default_rng(0).integers(0, 1 << 32, 16, np.uint32)
    words = [int(word) for word in beat]
    words[0] ^= 0xFFFFFFFF
    taken = [columns[place][bit] for place, word in enumerate(words) for bit in range(32) if word >> bit & 1]
    assert reduce(xor, taken) ^ 0xFFFFFFFF == native.crc32c(beat.ctypes.data, beat.nbytes)
