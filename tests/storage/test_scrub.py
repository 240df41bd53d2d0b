"""A scrub reads every extent of the newest generation; jobs are listed and removed."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageError, StorageLockedError
from lightning_smartinfinity.storage import StateStore, recover_store
from lightning_smartinfinity.storage.jobs.jobs import Job, find_jobs, remove_job
from lightning_smartinfinity.storage.state import scrub
from lightning_smartinfinity.storage.state.scrub import scrub_rank
from tests.helpers.attacks import Attack
from tests.helpers.native_testing import Hold
from tests.storage.makers import create, flip, left, tree


def made(*folders: Path) -> tuple[StateStore, list[Path]]:
    """Return a closed store of two generations, and its folders."""
    left(*folders, generations=2)
    store = recover_store(folders)
    store.close(remove=False)
    return store, [folder / "default" / "rank-00000" for folder in folders]


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_a_whole_store(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All extents of both folders are read, in any order of the folders, with progress, and nothing changes.

    State that is partly in a folder which was not named is not called whole.
    """
    monkeypatch.setattr(scrub, "_BATCH", batch)
    store, folders = made(tmp_path / "a", tmp_path / "b")
    before, told = tree(tmp_path), []

    @contextmanager
    def show(what: str, total: int) -> Iterator[Any]:
        told.append(total)
        yield lambda nbytes: told.append(-nbytes)

    found = scrub_rank(folders[::-1], rank=0, show=show)
    assert (found.generation, found.num_extents, found.damaged) == (1, store.extents.num_tasklets, ())
    (sentence,) = scrub_rank(folders[:1], rank=0, show=hidden).damaged
    assert "2 storage folders; 1 named" in sentence
    assert found.num_bytes == sum(extent.nbytes for extent in store.extents.extents) > 0
    assert sum(told) == 0 and len(told) > 1 and tree(tmp_path) == before
    assert recover_store([tmp_path / "a", tmp_path / "b"]).generation == 1


def test_every_damaged_extent_is_named(tmp_path: Path, attack: Attack) -> None:
    """A flipped bit in any region or trailer is found, and two damaged extents are both named."""
    store, (folder,) = made(tmp_path)
    offsets = [store.extents.place_offset(int(position)) for position in store.placement.positions]
    path = folder / "state.bin"
    for tasklet, at in [(0, 0), (1, 4096), (2, 8192), (4, store.extents.extents[4].nbytes - 1)]:
        before = flip(path, offsets[tasklet] + at)
        (sentence,) = scrub_rank([folder], rank=0, show=hidden).damaged
        assert f"tasklet {tasklet} at offset {offsets[tasklet]} of {path}" in sentence
        path.write_bytes(before)
    (free, *_) = set(range(2 * store.extents.num_tasklets)) - set(store.placement.positions.tolist())
    # The last is where the newest generation has nothing.
    for offset in (offsets[1], offsets[3], store.extents.place_offset(free)):
        flip(path, offset)
    assert len(scrub_rank([folder], rank=0, show=hidden).damaged) == 2
    attack("bit flip in state on storage, before a scrub", tries=6, outcome="the scrub names the extent")


@pytest.mark.parametrize("name", ["manifest.json", "commit.bin", "state.bin"])
def test_a_file_without_content(tmp_path: Path, name: str) -> None:
    """A truncated file is damage, and is named."""
    store, (folder,) = made(tmp_path)
    os.truncate(folder / name, 0)
    damaged = scrub_rank([folder], rank=0, show=hidden).damaged
    assert damaged and all(name in sentence for sentence in damaged)
    assert len(damaged) == (store.extents.num_tasklets if name == "state.bin" else 1)


def test_the_lock_of_a_store_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to the lock, two may read at once, and a training that starts meanwhile is told why not."""
    _, (folder,) = made(tmp_path)
    (folder / "lock").write_text("123\n" + "\n".join(sorted((folder / "lock").read_text().splitlines()[1:])) + "\n")
    before = (folder / "lock").read_bytes()
    seen = []

    @contextmanager
    def show(what: str, total: int) -> Iterator[Any]:
        assert scrub_rank([folder], rank=0, show=hidden).damaged == () and not find_jobs(tmp_path)[0].in_use
        with pytest.raises(StorageLockedError, match="by a process that reads it"):
            create([tmp_path])
        seen.append(what)
        yield lambda nbytes: None

    assert scrub_rank([folder], rank=0, show=show).damaged == ()
    assert seen and (folder / "lock").read_bytes() == before


def test_a_drive_that_is_mounted_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened for writing."""
    _, (folder,) = made(tmp_path)
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", read_only)
    found = scrub_rank([folder], rank=0, show=hidden)
    assert (found.damaged, found.unknown) == ((), ()) and found.num_extents


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read is given up, and what was found before is told; it is not called damage."""
    _, (folder,) = made(tmp_path)
    flip(folder / "state.bin", 0)
    damaged = set(scrub_rank([folder], rank=0, show=hidden).damaged)
    monkeypatch.setattr(scrub, "IO_TIMEOUT", 0.2)
    monkeypatch.setattr(scrub, "_BATCH", 1)
    real, holds = scrub._failure, []

    def failure(pipeline: Any, *rest: Any) -> Any:
        if not holds:
            holds.append(Hold(pipeline, read_at=4, count=1 << 20))
        return real(pipeline, *rest)

    monkeypatch.setattr(scrub, "_failure", failure)
    try:
        found = scrub_rank([folder], rank=0, show=hidden)
    finally:
        holds[0].release()
    assert set(found.damaged) <= damaged
    (sentence,) = found.unknown
    assert "state.bin" in sentence and "did not return within" in sentence


# ---- jobs in a storage folder: what is listed, and what is removed


def of_ranks(storage: Path, *generations: int, **config: object) -> None:
    """Leave the state of one rank of a job for each of these generations."""
    for rank, generation in enumerate(generations):
        left(storage, rank=rank, generations=generation + 1, **config)


def only(storage: Path) -> Job:
    (job,) = find_jobs(storage)
    return job


def test_a_dead_job(tmp_path: Path) -> None:
    """The newest generation is the one that all ranks have, and the size is what their files take."""
    of_ranks(tmp_path, 2, 1, job="mine")
    (tmp_path / "mine/notes").mkdir()
    (tmp_path / "others").mkdir()
    before = tree(tmp_path)
    job = only(tmp_path)
    assert (job.name, job.generation, job.in_use, job.pids, job.kept, job.problems) == ("mine", 1, False, [], False, [])
    assert [(folder.rank, folder.pid, folder.generation) for folder in job.folders] == [
        (0, os.getpid(), 2),
        (1, os.getpid(), 1),
    ]
    files = [path for path in (tmp_path / "mine").rglob("*") if path.is_file() and path.name != "lock"]
    assert job.num_bytes == sum(path.stat().st_blocks * 512 for path in files) > 0
    assert job.written is not None and abs(job.written - time.time()) < 3600 and tree(tmp_path) == before


def test_files_of_something_else_stay(tmp_path: Path) -> None:
    """A folder with other files is left, and is named. Of archived files only manifests and locks are ours."""
    of_ranks(tmp_path, 0)
    folder = tmp_path / "default/rank-00000"
    names = ["mine", "notes.aside", "manifest.json.x.aside", "manifest.json.1.aside.txt", "lockx1.aside"]
    for name in [*names, "manifest.json.2.aside", "lock.1.aside"]:
        (folder / name).touch()
    assert remove_job(only(tmp_path), kept=False) == [folder] and sorted(os.listdir(folder)) == sorted(names)


def test_a_kept_job_is_removed_on_request(tmp_path: Path) -> None:
    """State that is to be kept goes only if that is asked for, also if it was not yet to be kept when it was listed."""
    of_ranks(tmp_path, 0)
    listed = only(tmp_path)
    of_ranks(tmp_path, 0, keep=True)
    before = tree(tmp_path)
    with pytest.raises(StorageError, match="is to be kept"):
        remove_job(listed, kept=False)
    assert only(tmp_path).kept and tree(tmp_path) == before
    remove_job(listed, kept=True)
    assert tree(tmp_path) == set()


def test_a_job_that_cannot_be_read(tmp_path: Path) -> None:
    """A damaged manifest, a link in place of a folder or of a file is told, and does not hide other jobs."""
    for name in ("damaged", "linked", "whole"):
        of_ranks(tmp_path, 0, job=name)
    (tmp_path / "damaged/rank-00000/manifest.json").write_text("{")
    (tmp_path / "linked/rank-00001").symlink_to(tmp_path / "whole/rank-00000")
    damaged, linked, whole = find_jobs(tmp_path)
    assert "not a readable manifest" in damaged.problems[0]
    assert "symbolic link" in linked.problems[0] and linked.folders[0].problem is None
    assert whole.problems == [] and whole.generation == 0


@pytest.mark.parametrize("content", [b"\0" * 40, b"\xff\xff\n"])
def test_a_job_with_a_damaged_lock(tmp_path: Path, content: bytes) -> None:
    """It is listed, and removed; what the lock's notes alone had told stays unknown."""
    of_ranks(tmp_path, 0)
    (tmp_path / "default/rank-00000/lock").write_bytes(content)
    job = only(tmp_path)
    assert job.damaged == (content[0] != 0) and remove_job(job, kept=False) == [] and tree(tmp_path) == set()
