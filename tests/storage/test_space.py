"""The check for free space: its arithmetic and its measurements."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.storage import SpaceRequest, measure_space, require_space, shortfalls
from tests.storage.makers import create, extents, left


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
    for machine in ("one", "two"):
        for file_system in (1, 2):
            sharing = [r for r in gathered if (r.machine, r.file_system) == (machine, file_system)]
            needed = sum(r.needed_bytes for r in sharing)
            free = min((r.free_bytes for r in sharing), default=0) + sum(r.reclaimable_bytes for r in sharing)
            hosts = tuple(sorted({r.host for r in sharing}))
            found = [s for s in verdict if (s.hosts, s.needed_bytes, s.free_bytes) == (hosts, needed, free)]
            assert bool(found) >= (needed > free)
    assert all(shortfall.needed_bytes > shortfall.free_bytes for shortfall in verdict)


def test_ranks_that_share_a_disk_are_summed() -> None:
    """Ranks on one disk are summed: each alone would fit, but not both. Ranks on different disks or machines fit.

    Containers on one machine share its disks despite their own host names, and the error names both. Space of leftovers
    counts as free.
    """
    (missing,) = shortfalls([request(path="/disk/b"), request(path="/disk/a")])
    assert (missing.needed_bytes, missing.free_bytes, missing.paths) == (120, 100, ("/disk/a", "/disk/b"))
    for fitting in ([], [request(file_system=8)], [request(machine="two")], [request(reclaimable_bytes=20)]):
        assert shortfalls([request(), *fitting]) == ()
    with pytest.raises(StorageFullError, match=r"on 'first', 'second', where"):
        require_space([request(host="second"), request(host="first")])


def test_error_names_folders_and_bytes() -> None:
    """The error says how much is needed, where, how much is free, and the remedy."""
    big = request(needed_bytes=3 << 30, free_bytes=1 << 30)
    with pytest.raises(
        StorageFullError, match=r"needs 3\.00 GiB in '/disk' on 'one', where 1\.00 GiB are free"
    ) as caught:
        require_space([big, request(machine="two", needed_bytes=5 << 20, free_bytes=1 << 20)])
    assert "5.00 MiB" in caught.value.problem
    assert "durability='none'" in caught.value.remedy
    require_space([])


def test_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    """A folder that does not exist yet is measured at its nearest parent, and nothing is created."""
    folders = [tmp_path / "not" / "yet", tmp_path / "there"]
    first, second = measure_space(folders, job="j", rank=0, extents=extents(2), num_parameters=2)
    status = os.statvfs(tmp_path)
    for device, found in enumerate((first, second)):
        assert found.file_system == tmp_path.stat().st_dev
        assert extents(2).file_bytes(device) < found.needed_bytes < extents(2).file_bytes(device) + 128 * 1024
        assert 0 < found.free_bytes <= status.f_blocks * status.f_frsize
        assert found.reclaimable_bytes == 0
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
    assert measured(tmp_path / "storage").free_bytes == 0
    assert list(tmp_path.iterdir()) == []
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
