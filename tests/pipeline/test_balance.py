"""The balance between folders: the bandwidths it measures, and the changes that are worth making."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.devices import FolderTraffic
from lightning_smartinfinity.pipeline.layout.balance import Balance

MB = 1_000_000


def better(rates: Sequence[float], moved: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Return the better counts after a step.

    Each folder moves 1 MB per tasklet, half of it each way, at its rate in MB/s.
    """
    balance = Balance(len(rates))
    assert balance.better(counts) is None, "nothing is known before the first measurement"
    before = [FolderTraffic(read_bytes=7, write_bytes=5, busy_seconds=3.0)] * len(rates)
    step = [
        FolderTraffic(read_bytes=n * MB // 2, write_bytes=n * MB // 2, busy_seconds=n / rate)
        for n, rate in zip(moved, rates, strict=True)
    ]
    balance.begin(before)
    balance.end([one + two for one, two in zip(before, step, strict=True)])
    found = balance.better(counts)
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    ("rates", "counts", "expected"),
    [
        ([300, 100], [20, 20], [30, 10]),
        ([100, 100, 200], [8, 8, 8], [6, 6, 12]),
        ([150, 100], [50, 50], [60, 40]),
        ([106, 100], [50, 50], None),
        ([150, 100], [60, 40], None),
        ([110, 100], [3, 2], None),
    ],
)
def test_proportional_to_bandwidth(rates: list[float], counts: list[int], expected: list[int] | None) -> None:
    """A folder gets tasklets in proportion to its bandwidth, if that saves a tenth of the step's time.

    Even two disks of one model differ in speed.
    """
    assert better(rates, counts, counts) == expected


def test_a_folder_that_moved_nothing() -> None:
    """Nothing is known of its bandwidth, so nothing changes."""
    assert better([100, 10], [5, 0], [5, 5]) is None


@given(st.data(), st.integers(2, 5))
def test_a_change_is_never_for_the_worse(data: st.DataObject, folders: int) -> None:
    """A change makes the step at least a tenth faster, and no other change follows at the same bandwidths."""
    rates = data.draw(st.lists(st.floats(0.1, 1e4), min_size=folders, max_size=folders))
    counts = data.draw(st.lists(st.integers(1, 60), min_size=folders, max_size=folders))
    found = better(rates, counts, counts)
    if found is not None:
        assert sum(found) == sum(counts)
        before, after = (max(n / r for n, r in zip(numbers, rates, strict=True)) for numbers in (counts, found))
        assert before > 1.09 * after
        assert better(rates, counts, found) is None
