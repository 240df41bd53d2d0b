"""The kernel's counters tell whether a disk still answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_smartinfinity.storage.io.deadlines import completed_requests, counters_of

# As Linux writes it since 5.5: reads, merges, sectors, time; writes, merges, sectors, time; in flight, times;
# discards, merges, sectors, time; flushes, time.
STAT = " 638158 36241 107285 960 837820 520424 153758 394 0 205 1454 520067 96 76521 86 97945 12"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (STAT, 638158 + 837820 + 520067 + 97945),
        ("5 0 80 1 7 0 90 2 0 3 3\n", 12),
        ("", None),
        ("x", None),
        (None, None),
    ],
)
def test_counted_requests(tmp_path: Path, content: str | None, found: int | None) -> None:
    """Reads, writes, discards and flushes that the device has completed count; older kernels count the first two."""
    counters = tmp_path / "stat"
    if content is not None:
        counters.write_text(content)
    assert completed_requests(counters) == found


def test_counters_of_a_path(tmp_path: Path) -> None:
    """They are those of the device, or partition, on which a path will lie; what has no device has none."""
    made, missing = tmp_path / "made", tmp_path / "made" / "a" / "b"
    made.mkdir()
    devices = tmp_path / "devices"
    assert counters_of(missing, devices=devices) is None
    device = os.stat(made).st_dev
    folder = devices / f"{os.major(device)}:{os.minor(device)}"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(STAT)
    assert counters_of(missing, devices=devices) == counters_of(made, devices=devices) == folder / "stat"
