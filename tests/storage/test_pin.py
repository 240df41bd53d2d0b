"""A pinned generation keeps its places, whatever is committed, rolled back or moved meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.storage.spread import Placement, next_placement, places_needed
from lightning_smartinfinity.storage.state import capacities
from lightning_smartinfinity.storage.state.commit_record import CommitRecord
from lightning_smartinfinity.storage.state.pin import Pin
from tests.storage.makers import commit_generation, created, recovered


def places(placement: Placement, tasklets: Sequence[int] | None = None) -> set[tuple[int, int]]:
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
        assert len(places(following)) == count
        assert not places(following) & places(current)
        assert not places(following) & places(pin.record.placement, sorted(held))
        written = data.draw(st.sets(st.integers(0, count - 1)))
        current = current.after(following, np.array(sorted(written), np.intp))
        released = data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
        pin.release(released)
        held -= released


def test_a_pin_grows_the_files_and_keeps_assigned_folders(tmp_path: Path) -> None:
    """Files have three places for each tasklet afterwards; assigned folders change again once the pin is released."""
    folders = [tmp_path / "a", tmp_path / "b"]
    with created(folders) as store:
        commit_generation(store, 0)
        before = store.storage_bytes
        store.make_room_to_pin()
        assert store.storage_bytes == before * 3 // 2
        pin = store.pin()
        assert store.storage_bytes == before * 3 // 2, "there was room already"
        for generation in range(1, 4):
            assert not places(store.next_placement()) & places(pin.record.placement)
            commit_generation(store, generation)
        assert not store.spread([1, store.extents.num_tasklets - 1])
        pin.release_all()
        assert store.spread([1, store.extents.num_tasklets - 1])
        assert pin.record.generation == 0 and store.generation == 3
        store.close(remove=False)
    assert recovered(*folders) == 3  # as after a kill


def test_a_rollback_of_a_later_generation_leaves_the_pin(tmp_path: Path) -> None:
    """The generation after the pinned one is rolled back, and the next one takes no pinned place either."""
    with created([tmp_path]) as store:
        commit_generation(store, 0)
        pin = store.pin()
        commit_generation(store, 1)
        store.revert()
        assert store.generation == pin.record.generation
        assert not places(store.next_placement()) & places(pin.record.placement)


def test_a_pin_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If less than half of the free space stayed free, the pin raises, and files stay as they are."""
    monkeypatch.setattr(capacities, "has_room", lambda *_, **__: False)
    with created([tmp_path]) as store:
        commit_generation(store, 0)
        before = store.storage_bytes
        with pytest.raises(StorageFullError, match="over half of the free space"):
            store.pin()
        assert store.storage_bytes == before
