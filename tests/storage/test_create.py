"""Creating and removing a store, and spreading it over folders: the space it needs, and the obstacles it reports."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock, call

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from lightning_smartinfinity.errors import ConfigError, StorageError, StorageFullError
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.storage import (
    ExtentMap,
    SpaceRequest,
    StateStore,
    measure_space,
    recover_store,
    require_space,
    shortfalls,
)
from lightning_smartinfinity.storage.spread import Placement, apportion, interleave, next_placement, places_needed
from lightning_smartinfinity.storage.state import capacities as capacities_module
from lightning_smartinfinity.storage.state.commit_record import CommitRecord
from lightning_smartinfinity.storage.state.opening import create_store
from lightning_smartinfinity.storage.state.pin import Pin
from lightning_smartinfinity.storage.state.space import has_room
from tests.storage.makers import commit_generation, create, created, description, extents, left, recovered, tree


def refused(number: int) -> Mock:
    """Return a call of the system that fails with this error."""
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_close_when_storage_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be removed stays without an error, and every folder is unlocked."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders)
    with monkeypatch.context() as gone:
        gone.setattr(os, "unlink", refused(errno.EIO))
        store.close(remove=True)
    assert {"a/default/rank-00000/lock", "b/default/rank-00000/state.bin"} < tree(tmp_path)
    create(folders).close(remove=True)
    assert tree(tmp_path) == {"a", "b"}


def test_leftovers_are_replaced(tmp_path: Path) -> None:
    """A new store silently replaces a leftover that is unlocked and was not to be kept.

    A state file without a manifest, and a manifest that was being written, are replaced, too, because the lock says
    that this package made them.
    """
    folder = left(tmp_path)
    (folder / "manifest.json.new").write_text("half")
    with created([tmp_path]) as store:
        assert store.generation == -1
    folder.mkdir(parents=True)
    (folder / "state.bin").write_bytes(b"half")
    (folder / "lock").write_text("1234\nstate.bin\n")
    create([tmp_path]).close(remove=True)
    assert tree(tmp_path) == set()


def test_same_folder_twice(tmp_path: Path) -> None:
    """One folder under two names is a setting error, not a lock conflict."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"link' twice"):
        create([tmp_path, tmp_path / "link"])
    assert tree(tmp_path) == {"link"}


@pytest.mark.parametrize(
    ("storage", "job", "problem", "remedy"),
    [
        *(
            (storage, "default", "Creating the folder", "remove it, or choose another folder")
            for storage in ("file", "file/below", "job", "rank")
        ),
        *(
            (storage, "default", "Creating the folder", "choose another folder")
            for storage in ("/proc/nowhere", "/sys/kernel/nowhere", "/dev/null/nowhere")
        ),
        ("new", "j" * 300, "File name too long", "shorter"),
        ("link/below", "default", "link' is a symbolic link to 'gone', which does not exist", "Mount or make"),
    ],
)
def test_folder_that_cannot_be_made(tmp_path: Path, storage: str, job: str, problem: str, remedy: str) -> None:
    """A file anywhere in the path of a folder, one that not even root can make, and a long name are refused."""
    (tmp_path / "link").symlink_to("gone")
    for file in ("file", "job/default", "rank/default/rank-00000"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    before = tree(tmp_path)
    with pytest.raises(StorageError, match=problem) as caught:
        create([tmp_path / "made", tmp_path / storage], job=job)
    assert remedy in caught.value.remedy and tree(tmp_path) == before


def test_too_little_space(tmp_path: Path) -> None:
    """A store too large for the file system is refused before anything is allocated."""
    huge = ExtentMap(numel=1 << 50, tasklet_numel=1 << 45, num_arrays=3, num_devices=1, places_per_tasklet=2)
    with pytest.raises(StorageFullError, match=r"needs .* GiB in '.*where .* GiB are free"):
        create_store([tmp_path / "new"], config=TransferConfig(), extents=huge, description=description())
    assert tree(tmp_path) == set()


def half_allocated(number: int) -> Callable[[int, int, int], None]:
    """Return a ``posix_fallocate`` that allocates the first file, and half of the second."""
    real, calls = os.posix_fallocate, list[int]()

    def allocate(descriptor: int, offset: int, length: int) -> None:
        calls.append(length)
        real(descriptor, offset, length // len(calls))
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))

    return allocate


ALLOCATING = r"Allocating \d+ bytes for .*b/default/rank-00000/state\.bin"


@pytest.mark.parametrize(
    ("name", "call", "kind", "problem", "remedy"),
    [
        ("posix_fallocate", half_allocated(errno.ENOSPC), StorageFullError, ALLOCATING, "Free"),
        ("posix_fallocate", half_allocated(errno.EIO), StorageError, ALLOCATING, ""),
        ("replace", refused(errno.EROFS), StorageError, r"manifest\.json.*Read-only file system", "remount"),
    ],
    ids=["full", "broken", "read-only"],
)
def test_what_fails_half_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    call: Callable[..., None],
    kind: type[StorageError],
    problem: str,
    remedy: str,
) -> None:
    """If a later file fails, all files and folders are removed again, the first folder's as well."""
    monkeypatch.setattr(os, name, call)
    with pytest.raises(kind, match=problem) as caught:
        create([tmp_path / "a", tmp_path / "b"])
    assert type(caught.value) is kind and remedy in caught.value.remedy and tree(tmp_path) == set()


@pytest.mark.parametrize(
    ("limit", "value", "remedy"),
    [(resource.RLIMIT_FSIZE, 64 * 1024, "ulimit -f"), (resource.RLIMIT_NOFILE, None, "ulimit -n")],
    ids=["file size", "descriptors"],
)
def test_limits_of_the_process(tmp_path: Path, limit: int, value: int | None, remedy: str) -> None:
    """A file size limit and a lack of descriptors are named in the error, and nothing is left behind."""
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (free + 1 if value is None else value, hard))
    try:
        with pytest.raises(StorageError) as caught:
            create([tmp_path / "a", tmp_path / "b"])
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert remedy in caught.value.remedy and tree(tmp_path) == set()


def test_interrupted_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the commit leaves the previous generation, in memory and on storage."""
    real = os.pwrite

    def interrupt_once(descriptor: int, content: bytes, offset: int) -> int:
        monkeypatch.setattr(os, "pwrite", real)
        real(descriptor, content, offset)
        raise KeyboardInterrupt

    store = create([tmp_path])
    commit_generation(store, 0)
    monkeypatch.setattr(os, "pwrite", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        commit_generation(store, 1)
    assert store.generation == 0
    store.close(remove=False)
    assert recovered(tmp_path) == 0


# ---- the check for free space: its arithmetic and its measurements


request = partial(SpaceRequest, machine="one", host="one", file_system=7, path="/disk", needed_bytes=60, free_bytes=100)
requests = st.lists(
    st.builds(
        SpaceRequest,
        machine=st.sampled_from(["one", "two"]),
        host=st.sampled_from(["first", "second"]),
        file_system=st.integers(1, 2),
        path=st.sampled_from(["/a", "/b"]),
        needed_bytes=st.integers(0, 100),
        free_bytes=st.integers(0, 200),
        reclaimable_bytes=st.integers(0, 20),
    ),
    max_size=8,
)


@given(requests, st.randoms())
def test_verdict_does_not_depend_on_order(gathered: list[SpaceRequest], random: object) -> None:
    """All ranks come to the same result in any order of requests. Space is summed per file system of a machine."""
    shuffled = list(gathered)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    verdict = shortfalls(gathered)
    assert shortfalls(shuffled) == verdict
    for machine, file_system in itertools.product(("one", "two"), (1, 2)):
        sharing = [r for r in gathered if (r.machine, r.file_system) == (machine, file_system)]
        needed = sum(r.needed_bytes for r in sharing)
        free = min((r.free_bytes for r in sharing), default=0) + sum(r.reclaimable_bytes for r in sharing)
        hosts = tuple(sorted({r.host for r in sharing}))
        found = [s for s in verdict if (s.hosts, s.needed_bytes, s.free_bytes) == (hosts, needed, free)]
        assert bool(found) >= (needed > free)
    assert all(shortfall.needed_bytes > shortfall.free_bytes for shortfall in verdict)


def test_ranks_that_share_a_disk_are_summed() -> None:
    """Ranks on one disk are summed: each alone would fit, but not both. Ranks on different disks or machines fit.

    Containers on one machine share its disks despite their own host names. Space of leftovers counts as free. The error
    says how much is needed, where, how much is free, and the remedy.
    """
    (missing,) = shortfalls([request(path="/disk/b"), request(path="/disk/a")])
    assert (missing.needed_bytes, missing.free_bytes, missing.paths) == (120, 100, ("/disk/a", "/disk/b"))
    for fitting in ([], [request(file_system=8)], [request(machine="two")], [request(reclaimable_bytes=20)]):
        require_space([request(), *fitting])
    large = request(needed_bytes=3 << 30, free_bytes=1 << 30)
    needs = r"needs 3\.00 GiB in '/disk' on 'first', 'one', where 1\.00 GiB are free"
    with pytest.raises(StorageFullError, match=needs) as caught:
        require_space([large, request(host="first", needed_bytes=0, free_bytes=1 << 30), request(machine="two")])
    assert "durability='none'" in caught.value.remedy


def test_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    """A folder that does not exist yet is measured at its nearest parent, and nothing is created."""
    folders = [tmp_path / "not" / "yet", tmp_path / "there"]
    status = os.statvfs(tmp_path)
    for device, found in enumerate(measure_space(folders, job="j", rank=0, extents=extents(2), num_parameters=2)):
        assert (found.file_system, found.reclaimable_bytes) == (tmp_path.stat().st_dev, 0)
        assert extents(2).file_bytes(device) < found.needed_bytes < extents(2).file_bytes(device) + 80 * 1024
        assert 0 < found.free_bytes <= status.f_blocks * status.f_frsize
    assert device == 1 and list(tmp_path.iterdir()) == []


def measured(folder: Path) -> SpaceRequest:
    return measure_space([folder], job="j", rank=0, extents=extents(), num_parameters=2)[0]


@pytest.fixture
def without_space(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make the system say that no file system has free space."""
    real = os.statvfs

    def full(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[4] = 0  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    return monkeypatch


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EROFS, "mounted read-only"), (errno.EACCES, "and write permission"), (None, "choose another folder")],
    ids=["read-only", "no permission", "/proc"],
)
def test_a_folder_in_which_nothing_can_be_created(
    number: int | None, remedy: str, tmp_path: Path, without_space: pytest.MonkeyPatch
) -> None:
    """A read-only file system, which has no free space either, a lack of permission, and one without files are named.

    The error does not ask for more space.
    """
    folder = tmp_path / "storage" if number else Path("/proc/nowhere/storage")
    if number:
        without_space.setattr(os, "mkdir", refused(number))
    with pytest.raises(StorageError, match=os.strerror(number or errno.ENOENT)) as caught:
        measured(folder)
    assert not isinstance(caught.value, StorageFullError) and "are free" not in str(caught.value)
    assert remedy in caught.value.remedy and str(folder) in caught.value.problem


def test_a_full_file_system(tmp_path: Path, without_space: pytest.MonkeyPatch) -> None:
    """It is measured, whether or not it has room for another folder, and nothing is left there."""
    assert measured(tmp_path / "storage").free_bytes == 0 and list(tmp_path.iterdir()) == []
    without_space.setattr(os, "mkdir", refused(errno.ENOSPC))
    with pytest.raises(StorageFullError, match=r"where 0\.00 MiB are free"):
        require_space([measured(tmp_path / "storage")])


def test_leftovers(tmp_path: Path) -> None:
    """A store allocates no more than was measured. It counts as reclaimable unless it is to be kept or in use."""
    asked = measured(tmp_path)
    store = create([tmp_path], job="j")
    taken = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert taken <= asked.needed_bytes and measured(tmp_path).reclaimable_bytes == 0
    store.close(remove=False)
    assert measured(tmp_path).reclaimable_bytes >= extents().file_bytes(0)
    left(tmp_path, job="j", keep=True)
    assert measured(tmp_path).reclaimable_bytes == 0


# ---- the arithmetic of spreading tasklets over storage folders, and the files that grow for it


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
    real, no_room = os.posix_fallocate, Mock(return_value=False)

    def half(descriptor: int, offset: int, length: int) -> None:
        real(descriptor, offset, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with created([tmp_path / "a", tmp_path / "b"]) as store:
        commit_generation(store, 0)
        counts, before = store.counts, sizes(store)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(capacities_module, "has_room", no_room)
            assert not store.spread(ALL_ON_ONE) and not store.spread(ALL_ON_ONE)
        assert no_room.mock_calls == 2 * [call(ANY, 4 * store.extents.place_bytes, ranks=2)]
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
            patch.setattr(os, "posix_fallocate", refused(errno.ENOSPC))
            with pytest.raises(StorageFullError, match=r"state\.bin"):
                recover_store([tmp_path])
    store = recover_store([tmp_path])
    assert store.generation == 0 and length <= store.storage_bytes <= sizes(store)[0] <= length + max(more, 0)
    commit_generation(store, 1)
    store.close(remove=True)


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
