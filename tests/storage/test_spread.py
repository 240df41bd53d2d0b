"""The arithmetic of spreading tasklets over storage folders, and the files that grow for it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.storage import StateStore, recover_store
from lightning_smartinfinity.storage.spread import Placement, apportion, interleave, next_placement, places_needed
from lightning_smartinfinity.storage.state import capacities as capacities_module
from lightning_smartinfinity.storage.state.commit_record import CommitRecord
from lightning_smartinfinity.storage.state.pin import Pin
from lightning_smartinfinity.storage.state.space import has_room
from tests.storage.makers import commit_generation, create, created, left, recovered

counts_of_devices = st.lists(st.integers(0, 40), min_size=1, max_size=5)
ALL_ON_ONE = [5, 0]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(0, 500))
def test_counts_are_in_proportion(weights: list[float], count: int) -> None:
    """Counts add up and are proportional to the weights but for rounding. Each is at least one if there are enough."""
    counts = apportion(weights, count)
    assert counts.sum() == count
    if count >= len(weights):
        assert counts.min() >= 1
    for found, weight in zip(counts, weights, strict=True):
        assert abs(found - weight / sum(weights) * count) <= 1 + len(weights)


@given(counts_of_devices)
def test_any_run_of_tasklets_keeps_all_devices_busy(counts: list[int]) -> None:
    """In any prefix of the tasklets each device has its share, but for rounding."""
    assigned, total = interleave(counts), sum(counts)
    equal = interleave(apportion([1.0] * len(counts), total))
    assert equal.tolist() == [index % len(counts) for index in range(total)], "tasklets go to the devices in turn"
    assert np.bincount(assigned, minlength=len(counts)).tolist() == counts
    for device, count in enumerate(counts):
        had = np.cumsum(assigned == device)
        share = count / max(total, 1) * np.arange(1, total + 1)
        assert np.abs(had - share).max(initial=0) <= 1 + len(counts) / 2


@dataclass(frozen=True)
class Situation:
    """The arguments of `next_placement`."""

    current: Placement
    lying: NDArray[np.bool_]
    assigned: NDArray[np.uint16]
    capacities: list[int]
    first: int
    in_place: bool

    def next(self) -> Placement:
        return next_placement(
            self.current,
            lying=self.lying,
            assigned=self.assigned,
            capacities=self.capacities,
            first=self.first,
            in_place=self.in_place,
        )

    def places(self, placement: Placement, *, lying: bool = False) -> dict[int, tuple[int, int]]:
        """Return the places of the tasklets on storage, by index."""
        chosen = [i for i in range(self.first, len(self.assigned)) if self.lying[i] or not lying]
        return {i: (int(placement.devices[i]), int(placement.positions[i])) for i in chosen}


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Generate tasklets anywhere on storage, or not yet there, in files with room for another generation."""
    devices, num_tasklets = draw(st.integers(1, 4)), draw(st.integers(0, 30))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    in_place = draw(st.booleans())
    first = draw(st.integers(0, num_tasklets)) if in_place else 0
    assigned, lies_on = (random.integers(0, devices, num_tasklets).astype(np.uint16) for _ in range(2))
    capacities = [(1 if in_place else 2) * int((lies_on[first:] == device).sum()) for device in range(devices)]
    capacities[int(random.integers(devices))] += draw(st.integers(0, 5))
    positions = np.zeros(num_tasklets, np.uint32)
    for device in range(devices):
        (there,) = np.nonzero(lies_on[first:] == device)
        positions[there + first] = random.permutation(capacities[device])[: len(there)]
    lying = random.random(num_tasklets) < draw(st.sampled_from([0.0, 1.0] if in_place else [0.0, 0.7, 1.0]))
    return Situation(Placement(lies_on, positions), lying, assigned, capacities, first, in_place)


@settings(max_examples=300)
@given(situations())
def test_next_places_are_free_and_in_assigned_folders(situation: Situation) -> None:
    """Places are distinct and free, and in the file of the assigned folder unless that is full.

    With two places no extent on storage is overwritten.
    """
    held = situation.places(situation.current, lying=True)
    taken = situation.places(situation.next())
    assert len(set(taken.values())) == len(taken)
    assert all(position < situation.capacities[device] for device, position in taken.values())
    for index, place in taken.items():
        assert place not in held.values() or (situation.in_place and held.get(index) == place)
    for index, (device, _) in taken.items():
        wanted = int(situation.assigned[index])
        if device != wanted:
            used = {position for lies_on, position in (*taken.values(), *held.values()) if lies_on == wanted}
            assert len(used) == situation.capacities[wanted], "a tasklet is elsewhere although there is room"


@settings(max_examples=300)
@given(situations())
def test_with_the_places_needed_each_tasklet_is_in_its_assigned_folder(situation: Situation) -> None:
    """With the places that it needs, every tasklet goes to its assigned folder, now and next."""
    needed = places_needed(
        situation.current,
        lying=situation.lying,
        assigned=situation.assigned,
        num_devices=len(situation.capacities),
        first=situation.first,
        in_place=situation.in_place,
    )
    capacities = [max(pair) for pair in zip(needed, situation.capacities, strict=True)]
    lying = np.ones(len(situation.assigned), np.bool_)
    for _ in range(2):
        placement = replace(situation, capacities=capacities).next()
        assert np.array_equal(placement.devices[situation.first :], situation.assigned[situation.first :])
        situation = replace(situation, current=placement, lying=lying)


def sizes(store: StateStore) -> list[int]:
    return [os.stat(file.path).st_size for file in store.files]


@pytest.mark.parametrize("durability", ["step", "none"])
def test_files_grow_with_their_share(tmp_path: Path, durability: str) -> None:
    """A file grows with its share and is fully allocated, and no file shrinks.

    Recovery finds the generation and the lengths of the files again.
    """
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders, durability=durability)
    commit_generation(store, 0)
    before = sizes(store)
    assert store.spread(ALL_ON_ONE) and sizes(store)[0] > before[0] and sizes(store)[1] == before[1]
    assert sum(sizes(store)) == store.storage_bytes
    for file in store.files:
        assert os.stat(file.path).st_blocks * 512 >= os.stat(file.path).st_size
    for generation in (1, 2):
        commit_generation(store, generation)
        assert not store.placement.devices.any()
    placement, length = store.placement, sizes(store)
    store.close(remove=False)
    store = recover_store(folders)
    assert all(np.array_equal(*pair) for pair in zip(store.placement, placement, strict=True))
    assert sizes(store) == length and store.counts == ALL_ON_ONE
    commit_generation(store, 3)
    store.close(remove=True)


def test_files_that_cannot_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If growing would leave too little space for other ranks, or the disk is full after all, nothing changes.

    The log says so once. A file that could only be extended in part returns to its old length, and training continues.
    """
    asked: list[tuple[int, int]] = []
    real = os.posix_fallocate

    def refused(folder: Path, num_bytes: int, *, ranks: int) -> bool:
        asked.append((num_bytes, ranks))
        return False

    def half(descriptor: int, offset: int, length: int) -> None:
        real(descriptor, offset, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with created([tmp_path / "a", tmp_path / "b"]) as store:
        commit_generation(store, 0)
        counts, before = store.counts, sizes(store)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(capacities_module, "has_room", refused)
            assert not store.spread(ALL_ON_ONE) and not store.spread(ALL_ON_ONE)
        assert asked == 2 * [(4 * store.extents.place_bytes, 2)]
        assert [record.getMessage().count(str(tmp_path / "a")) for record in caplog.records] == [1]
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", half)
            assert not store.spread(ALL_ON_ONE)
        assert store.counts == counts and sizes(store) == before
        commit_generation(store, 1)
        assert store.spread(ALL_ON_ONE)


def test_growing_is_measured(tmp_path: Path) -> None:
    """All ranks together may take no more than half of the free space."""
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    assert has_room(tmp_path, free // 8, ranks=2) and not has_room(tmp_path, free // 3, ranks=2)


@pytest.mark.parametrize("more", [-40_000, -4096, -1, 1, 4096, 100_000])
def test_a_file_of_another_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Recovery allocates the lost end of a file again, so that no step meets a full disk. A longer one is accepted.

    A file may have grown before its process died.
    """
    path = left(tmp_path) / "state.bin"
    length = path.stat().st_size
    os.truncate(path, length + more)
    if more < 0:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", _full)
            with pytest.raises(StorageFullError, match=r"state\.bin"):
                recover_store([tmp_path])
    store = recover_store([tmp_path])
    assert store.generation == 0 and length <= store.storage_bytes <= sizes(store)[0] <= length + max(more, 0)
    commit_generation(store, 1)
    store.close(remove=True)


def _full(descriptor: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- a pinned generation keeps its places, whatever is committed, rolled back or moved meanwhile


def places_of(placement: Placement, tasklets: Sequence[int] | None = None) -> set[tuple[int, int]]:
    found = list(zip(placement.devices.tolist(), placement.positions.tolist(), strict=True))
    return set(found if tasklets is None else [found[index] for index in tasklets])


@given(st.data())
def test_no_generation_takes_a_pinned_place(data: st.DataObject) -> None:
    """With three places for each tasklet every later generation finds places, and none that is still pinned."""
    num_devices = data.draw(st.integers(1, 3))
    assigned = np.array(data.draw(st.lists(st.integers(0, num_devices - 1), min_size=1, max_size=9)), np.uint16)
    count = len(assigned)
    lying = np.ones(count, np.bool_)
    nowhere = Placement(np.zeros(count, np.uint16), np.zeros(count, np.uint32))
    many = [2 * count] * num_devices
    current = next_placement(nowhere, lying=~lying, assigned=np.roll(assigned, 1), capacities=many)
    numbers = np.zeros(count, np.int64)
    pin = Pin(CommitRecord(generation=0, placement=current, tasklet_generations=numbers, steps=numbers[:1]))
    needed = places_needed(current, lying=lying, assigned=assigned, num_devices=num_devices)
    here = np.bincount(current.devices, minlength=num_devices)
    used = int(max(current.positions)) + 1
    room = [max(used, both + int(pinned)) for both, pinned in zip(needed, here, strict=True)]
    held = set(range(count))
    for _ in range(4):
        following = next_placement(current, lying=lying, assigned=assigned, capacities=room, pinned=[pin.occupied])
        assert len(places_of(following)) == count and not places_of(following) & places_of(current)
        assert not places_of(following) & places_of(pin.record.placement, sorted(held))
        written = data.draw(st.sets(st.integers(0, count - 1)))
        current = current.after(following, np.array(sorted(written), np.intp))
        released = data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
        pin.release(released)
        held -= released


def test_a_pin_grows_the_files_and_keeps_assigned_folders(tmp_path: Path) -> None:
    """Files have three places for each tasklet afterwards; assigned folders change again once the pin is released.

    If the generation after the pinned one is rolled back, the next one takes no pinned place either.
    """
    folders = [tmp_path / "a", tmp_path / "b"]
    with created(folders) as store:
        commit_generation(store, 0)
        before = store.storage_bytes
        store.make_room_to_pin()
        assert store.storage_bytes == before * 3 // 2
        first, pin, last = (store.pin() for _ in range(3))
        for other in (first, last):
            other.release_all()  # the one between them goes on to hold all of its places
        assert store.storage_bytes == before * 3 // 2, "there was room already"
        commit_generation(store, 1)
        store.revert()
        assert store.generation == pin.record.generation
        for generation in range(1, 4):
            assert not places_of(store.next_placement()) & places_of(pin.record.placement)
            commit_generation(store, generation)
        assert not store.spread([1, store.extents.num_tasklets - 1])
        pin.release_all()
        assert store.spread([1, store.extents.num_tasklets - 1])
        assert pin.record.generation == 0 and store.generation == 3
        store.close(remove=False)
    assert recovered(*folders) == 3  # as after a kill
