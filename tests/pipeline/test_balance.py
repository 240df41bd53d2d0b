"""The balance between folders: the bandwidths it measures, and the changes that are worth making."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.devices import FolderTraffic
from lightning_smartinfinity.pipeline.layout.balance import Balance

MB = 1_000_000


def measured(rates: Sequence[float], counts: Sequence[int], balance: Balance | None = None) -> Balance:
    """Return the balance after a step.

    Each folder moves 1 MB per tasklet, half of it each way, at its rate in MB/s.
    """
    balance = balance or Balance(len(rates))
    before = [FolderTraffic(read_bytes=7, write_bytes=5, busy_seconds=3.0)] * len(rates)
    step = [
        FolderTraffic(read_bytes=n * MB // 2, write_bytes=n * MB // 2, busy_seconds=n / rate)
        for n, rate in zip(counts, rates, strict=True)
    ]
    balance.begin(before)
    balance.end([one + two for one, two in zip(before, step, strict=True)])
    return balance


def better(balance: Balance, counts: Sequence[int]) -> list[int] | None:
    found = balance.better(counts)
    return None if found is None else found.tolist()


def test_proportional_to_bandwidth() -> None:
    """A folder gets tasklets in proportion to its bandwidth."""
    assert better(measured([300, 100], [20, 20]), [20, 20]) == [30, 10]
    assert better(measured([100, 100, 200], [8, 8, 8]), [8, 8, 8]) == [6, 6, 12]


def test_small_differences_change_nothing() -> None:
    """A change must save a tenth of the step's time, since even two disks of one model differ in speed."""
    assert better(measured([106, 100], [50, 50]), [50, 50]) is None
    assert better(measured([150, 100], [50, 50]), [50, 50]) == [60, 40]
    assert better(measured([150, 100], [60, 40]), [60, 40]) is None
    assert better(measured([110, 100], [3, 2]), [3, 2]) is None


def test_nothing_is_known_at_first() -> None:
    """Nothing changes before the first measurement, or after a step in which a folder moved nothing."""
    assert better(Balance(2), [9, 1]) is None
    assert better(measured([100, 10], [5, 0]), [5, 5]) is None


def test_a_folder_that_slows_down_and_recovers() -> None:
    """The share follows a folder's bandwidth within a few steps. A slow folder keeps one tasklet as a measurement."""
    counts, balance = [50, 50], measured([100, 100], [50, 50])
    assert better(balance, counts) is None
    for _ in range(5):
        measured([100, 0.5], counts, balance)
        counts = better(balance, counts) or counts
    assert counts == [99, 1]
    for _ in range(12):
        measured([100, 100], counts, balance)
        counts = better(balance, counts) or counts
    assert 45 <= counts[0] <= 55


@given(st.data(), st.integers(2, 5))
def test_a_change_is_never_for_the_worse(data: st.DataObject, folders: int) -> None:
    """A change makes the step at least a tenth faster, and no other change follows at the same bandwidths."""
    rates = data.draw(st.lists(st.floats(0.1, 1e4), min_size=folders, max_size=folders))
    counts = data.draw(st.lists(st.integers(1, 60), min_size=folders, max_size=folders))
    balance = measured(rates, counts)
    found = better(balance, counts)
    if found is not None:
        assert sum(found) == sum(counts)
        before, after = (max(n / r for n, r in zip(numbers, rates, strict=True)) for numbers in (counts, found))
        assert before > 1.09 * after
        assert better(balance, found) is None
