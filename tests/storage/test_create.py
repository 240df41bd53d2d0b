"""Creating and removing a store: the space it needs, the files it leaves behind, and the obstacles it reports."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.errors import (
    ConfigError,
    StorageError,
    StorageFullError,
)
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.storage import ExtentMap, SpaceRequest, measure_space, require_space, shortfalls
from lightning_smartinfinity.storage.state.opening import create_store
from tests.storage.makers import commit_generation, create, created, description, extents, left, recovered, tree

RANK_FILES = {"lock", "manifest.json", "state.bin"}


def test_close_when_storage_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be removed stays without an error, and every folder is unlocked."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as gone:
        gone.setattr(os, "unlink", fail)
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
    with created([tmp_path]):
        pass
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
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "default").touch()
    (tmp_path / "rank" / "default").mkdir(parents=True)
    (tmp_path / "rank" / "default" / "rank-00000").touch()
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


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


ALLOCATING = r"Allocating \d+ bytes for .*b/default/rank-00000/state\.bin"


@pytest.mark.parametrize(
    ("name", "call", "kind", "problem", "remedy"),
    [
        ("posix_fallocate", half_allocated(errno.ENOSPC), StorageFullError, ALLOCATING, "Free"),
        ("posix_fallocate", half_allocated(errno.EIO), StorageError, ALLOCATING, ""),
        ("replace", read_only, StorageError, r"manifest\.json.*Read-only file system", "remount"),
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


def request(**changes: object) -> SpaceRequest:
    values = {"machine": "one", "host": "one", "file_system": 7, "path": "/disk", "needed_bytes": 60, "free_bytes": 100}
    return SpaceRequest(**(values | changes))  # type: ignore[arg-type]


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
    first, second = measure_space(folders, job="j", rank=0, extents=extents(2), num_parameters=2)
    status = os.statvfs(tmp_path)
    for device, found in enumerate((first, second)):
        assert found.file_system == tmp_path.stat().st_dev
        assert extents(2).file_bytes(device) < found.needed_bytes < extents(2).file_bytes(device) + 128 * 1024
        assert 0 < found.free_bytes <= status.f_blocks * status.f_frsize and found.reclaimable_bytes == 0
    assert list(tmp_path.iterdir()) == []


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


def refused(number: int) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


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
