"""Several storage folders: tasklets follow the measured bandwidth, and stay if there is no room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.devices import HostDevice
from lightning_smartinfinity.devices.base import Traffic
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
