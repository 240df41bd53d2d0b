"""Several storage folders: tasklets follow the measured bandwidth, and stay if there is no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.devices import FolderTraffic, HostDevice
from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.pipeline.layout.balance import Balance
from lightning_smartinfinity.storage.state import capacities
from tests.helpers.native_testing import Throttle
from tests.pipeline.harness import Case, Run, assert_equal, running
from tests.pipeline.wandering import wander

# 65 tasklets, and none of them goes long without a gradient.
LARGE = ((150_000, 0, 0, 0), (100_000, 0, 1, 1), (80_000, 0, 0, 1))
SLOW = 10e6  # bytes per second
FAST = 16 * SLOW


def folder_bytes(run: Run) -> list[int]:
    return [folder.read_bytes + folder.write_bytes for folder in run.handler.traffic().folders]


def steps(run: Run, numbers: range) -> list[float]:
    """Do these steps and return each folder's part of the bytes that were moved."""
    before = folder_bytes(run)
    run.steps(numbers)
    moved = [now - then for now, then in zip(folder_bytes(run), before, strict=True)]
    return [one / sum(moved) for one in moved]


class Metered(HostDevice):
    """A host device whose folders count as busy for their bytes at a given rate, without a clock.

    Args:
        rates: Bytes per second of each folder. A change applies to bytes moved from then on.
    """

    def __init__(self, rates: list[float]) -> None:
        super().__init__(num_buffers=8)
        self.rates = rates
        self._moved = [0] * len(rates)
        self._seconds = [0.0] * len(rates)

    def counters(self) -> Traffic:
        traffic = super().counters()
        for index, folder in enumerate(traffic.folders):
            moved = folder.read_bytes + folder.write_bytes
            self._seconds[index] += (moved - self._moved[index]) / self.rates[index]
            self._moved[index] = moved
        folders = zip(traffic.folders, self._seconds, strict=True)
        return replace(traffic, folders=tuple(replace(folder, busy_seconds=busy) for folder, busy in folders))


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_slow_folder_has_less_to_do(tmp_path: Path, durability: str) -> None:
    """A slow folder gets fewer tasklets and moves fewer bytes until it is as fast as the others again."""
    device = Metered([FAST, FAST])
    case = Case(num_devices=2, num_buffers=8, shapes=LARGE, durability=durability)
    with running(tmp_path, case, device=lambda run: device) as run:
        num_tasklets = len(run.layout.tasklets)
        device.rates[0] = SLOW
        run.steps(range(4))
        assert run.store.counts[0] <= 1 + num_tasklets * SLOW / (SLOW + FAST)
        assert steps(run, range(4, 6))[0] < 0.1
        written = run.store.tasklet_generations == run.handler.generation
        assert np.array_equal(run.store.placement.devices[written], run.store.assigned[written])
        device.rates[0] = FAST
        run.steps(range(6, 12))
        assert steps(run, range(12, 14))[0] > 0.4
        assert run.store.counts[0] > 0.4 * num_tasklets


class Fixed(HostDevice):
    """A host device that does not allow tasklets to move."""

    @property
    def moves_tasklets(self) -> bool:
        return False


def test_tasklets_that_cannot_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device cannot move tasklets, they stay in their folders however slow these are."""
    monkeypatch.setattr("tests.pipeline.harness.HostDevice", Fixed)
    with running(tmp_path, Case(num_devices=2)) as run:
        assigned = run.store.placement.devices.copy()
        Throttle(run.device.pipeline, run.store.files[:1]).bytes_per_second = SLOW
        run.steps(range(4))
        assert np.array_equal(run.store.placement.devices, assigned)
        assert np.array_equal(assigned, np.arange(len(assigned)) % 2)


def test_full_disk_when_tasklets_are_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, tasklets stay in their folders and training gives the same bits."""
    with running(tmp_path / "one", Case()) as run:
        run.steps(range(3))
        expected = run.state()
    monkeypatch.setattr(capacities, "has_room", lambda *_, **__: False)
    with running(tmp_path / "two", Case(num_devices=2)) as run:
        wander(run)
        length = run.handler.storage_bytes
        run.steps(range(3))
        assert run.handler.storage_bytes == length == 2 * 7 * run.layout.extents.place_bytes
        assert_equal(run.state(), expected)


# ---- the balance between folders: the bandwidths it measures, and the changes that are worth making


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
