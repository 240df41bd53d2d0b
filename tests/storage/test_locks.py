"""One process at a time holds a folder: locks, who holds them, and what two stores do in one folder."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.scrub import scrub_jobs
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageError, StorageLockedError
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders import lock_content, staging_folder
from lightning_smartinfinity.storage.folders.lock import FolderLock, acquire, is_locked
from lightning_smartinfinity.storage.folders.lock_content import packed
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.replacement import flush
from lightning_smartinfinity.storage.folders.staging_folder import locked, mark_of
from lightning_smartinfinity.storage.state.space import leftover_bytes
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.power_loss import RecordedDisk, content
from tests.helpers.waiting import LIMIT, await_that
from tests.storage.makers import (
    commit_generation,
    create,
    created,
    flipped,
    held_by_another_process,
    left,
    listed,
    recovered,
    tree,
)


@pytest.mark.parametrize("device", [0, 1])
def test_kept_store_is_refused(tmp_path: Path, device: int) -> None:
    """A store created with keep=True is not replaced, whichever of its folders is named again."""
    folders = [tmp_path / "a", tmp_path / "b"]
    left(*folders, keep=True)
    before = tree(tmp_path)
    with pytest.raises(StorageError, match=r"asked to keep it.*Remove that folder"):
        create([tmp_path / "new", folders[device]])
    assert tree(tmp_path) == before and recovered(*folders) == 0


def test_locked_by_another_process(tmp_path: Path) -> None:
    """The error names the process that holds the folder, and that process's store is untouched."""
    folder = left(tmp_path)
    before = tree(tmp_path)
    with held_by_another_process(folder) as holder:
        for attempt in (create, recover_store):
            with pytest.raises(StorageLockedError, match=rf"process {holder}.*TransferConfig\(job=\.\.\.\)"):
                attempt([tmp_path])
        assert is_locked(OpenFolder(folder)) and tree(tmp_path) == before
    create([tmp_path]).close(remove=True)


def test_a_look_at_a_lock_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that looks, at the moment in which another starts, neither stops it nor another look."""
    folder = OpenFolder(left(tmp_path))
    glance = folder.open("lock", os.O_RDONLY)
    fcntl.flock(glance, fcntl.LOCK_SH)
    assert not is_locked(folder)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(glance))
    create([tmp_path]).close(remove=True)


@pytest.mark.parametrize("how", ["zeros", "nothing", "noise"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_damaged_lock(tmp_path: Path, how: str, keep: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A lock that a power loss left without content, or that is damaged beside a leftover, stops no job.

    State that is to be kept stays: its manifest says so.
    """
    lock = left(tmp_path, keep=keep) / "lock"
    assert leftover_bytes(lock.parent) > 0 or keep
    noise = b"\xff" + lock.read_bytes()[1:]
    lock.write_bytes({"zeros": bytes(lock.stat().st_size), "nothing": b"", "noise": noise}[how])
    assert (leftover_bytes(lock.parent) > 0) != keep
    before = tree(tmp_path)
    with pytest.raises(StorageError) if keep else nullcontext() as caught, caplog.at_level(logging.WARNING):
        create([tmp_path]).close(remove=True)
    if caught is not None:
        assert "Remove" in caught.value.remedy and tree(tmp_path) == before
    elif how == "noise":
        assert tree(tmp_path) == {"default", "default/rank-00000", "default/rank-00000/lock.1.aside"}
        assert lock.with_name("lock.1.aside").read_bytes() == noise
        (message,) = [record.getMessage() for record in caplog.records]
        assert str(lock) in message and "lock.1.aside" in message
    else:
        assert tree(tmp_path) == set() and not caplog.records


def newer_lock() -> bytes:
    with mock.patch.multiple(lock_content, LOCK_VERSION=2, __version__="9.9.9"):
        return packed(1, ["state.bin"])


FOREIGN = r"is not a lock of this package.*Remove it"
NEWER = r"newer version .* 9\.9\.9, .* 2\. .* reads 1\. .* 9\.9\.9"


@pytest.mark.parametrize(
    ("foreign", "said"), [(b"precious\n", FOREIGN), (b"precious\n" * 10_000, FOREIGN), (newer_lock(), NEWER)]
)
def test_a_lock_of_something_else(tmp_path: Path, foreign: bytes, said: str) -> None:
    """A file in place of a lock is not replaced, unless it is small and stands beside a manifest.

    So does a lock of a newer version.
    """
    lock = left(tmp_path) / "lock"
    if foreign == b"precious\n":
        (lock.parent / "manifest.json").unlink()
    lock.write_bytes(foreign)
    before = tree(tmp_path)
    for attempt in (create, recover_store):
        with pytest.raises(StorageError, match=said):
            attempt([tmp_path])
    assert main(["scrub", str(tmp_path), "--quiet"]) == (2 if said == NEWER else 1)
    assert lock.read_bytes() == foreign and tree(tmp_path) == before


# Every 31st is each bit of some byte, and a bit of each byte.
@pytest.mark.parametrize("every", long_but([31], [31, 1]))
def test_no_bit_of_a_lock_misleads(every: int, tmp_path: Path, attack: Attack) -> None:
    """If notes change, the commands name the lock. They then name no checkpoint to go on from if a drive is lost."""
    folders, gone = [tmp_path / "a", tmp_path / "b"], tmp_path / "unmounted"
    store = create(folders, world_size=1)
    commit_generation(store, 0)
    store.record_training(generation=0, step=1, content=b"", has_steps=True)
    store.note_checkpoint(str(tmp_path), step=1)
    store.close(remove=False)
    lock = folders[0] / "default/rank-00000/lock"
    before, whole = lock.read_bytes(), listed(*folders)
    folders[1].rename(gone)
    (lost,) = listed(folders[0])
    assert str(tmp_path) in lost.problems[0].partition("newest checkpoint, after step 1: ")[2]
    flips = range(0, 8 * len(before), every)
    for number in flips:
        lock.write_bytes(flipped(before, number // 8, number % 8))
        (job,) = listed(folders[0])
        named = [sentence for sentence in job.problems if f"{str(lock)!r} is damaged" in sentence]
        assert named or job.problems == lost.problems, number
        assert not named or "go on from a checkpoint, or begin anew" in job.problems[0], number
        gone.rename(folders[1])
        jobs = listed(*folders)
        assert [job.resumable_step for job in jobs] == [1, None] and scrub_jobs(jobs, show=hidden).unknown == named
        assert named or (jobs[0].kept, *jobs[0].folders[0].part) == (False, *whole[0].folders[0].part), number
        assert recovered(*folders, remove=False) == 0
        assert lock.with_name("lock.1.aside").exists() == bool(named), number
        lock.with_name("lock.1.aside").unlink(missing_ok=True)
        folders[1].rename(gone)
    attack("bit flip in a lock, before jobs, scrub and a resume", tries=len(flips), outcome="named, or nothing changes")


def test_a_new_lock_survives_a_power_loss(tmp_path: Path) -> None:
    """The content of a new lock is on the device when the lock is held, so that its name never stands for zeros."""
    disk = RecordedDisk(tmp_path)
    lock = FolderLock(OpenFolder(disk.folder))
    flush(disk.folder)
    with disk.after_power_loss() as found:
        assert content(found) == {"lock": packed(os.getpid(), ())}
    disk.close()
    lock.release(remove=True)


def test_locked_by_this_process(tmp_path: Path) -> None:
    """Two stores of one process cannot share any of their folders. One that is garbage-collected has no lock."""
    with created([tmp_path / "a", tmp_path / "b"]):
        with pytest.raises(StorageLockedError, match=f"process {os.getpid()}"):
            create([tmp_path / "c", tmp_path / "b"])
        assert tree(tmp_path / "c") == set() or not (tmp_path / "c").exists()
    store = create([tmp_path])
    del store
    create([tmp_path]).close(remove=True)


def test_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A forked DataLoader worker that outlives the trainer does not keep the folder locked."""
    folder = OpenFolder(tmp_path)
    lock = FolderLock(folder)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[LIMIT], daemon=True)
    worker.start()
    try:
        assert is_locked(folder)
        lock.forget()
        await_that(lambda: not is_locked(folder))
        assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()


def test_lock_whose_file_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock file is removed while it is being locked, the lock is taken on the file now at the path."""
    real = fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / "lock").unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = FolderLock(OpenFolder(tmp_path))
    assert is_locked(OpenFolder(tmp_path))
    lock.release(remove=True)
    assert tree(tmp_path) == set()


def test_a_link_in_the_place_of_a_lock(tmp_path: Path) -> None:
    """It is not followed, however late it comes: what it leads to is neither made nor locked."""
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with mock.patch.object(os, "open", wraps=os.open) as opens, pytest.raises(OSError, match="symbolic links"):
        acquire(tmp_path / "lock", mode=0o600, in_use=lambda _: StorageLockedError("in use", "wait"))
    assert all(call.args[1] & os.O_NOFOLLOW for call in opens.mock_calls) and not (tmp_path / "elsewhere").exists()


def test_ranks_come_and_go(tmp_path: Path) -> None:
    """Ranks can create and remove their stores at the same time.

    A rank that removes the job's empty folder does not disturb another rank that is just creating its own.
    """

    def come_and_go(rank: int) -> None:
        for _ in range(25):
            create([tmp_path], rank=rank).close(remove=True)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(come_and_go, range(3), timeout=LIMIT)] == [None] * 3
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("name", [".nfs000000000003", ".fuse_hidden0000000600000001"])
def test_a_file_system_that_removes_open_files_late(name: str, tmp_path: Path) -> None:
    """The folders of a store and of a save go although the file system still has a file there under a hidden name."""
    store, staging = create([tmp_path]), tmp_path / ".saving"
    hidden = [tmp_path / "default/rank-00000" / name, staging / name]
    late = threading.Timer(0.2, lambda: [path.unlink() for path in hidden])
    with mock.patch.object(staging_folder, "remove_content"), locked(staging, tmp_path):
        for path in hidden:
            path.touch()
        mark_of(staging).unlink()
        late.start()
    store.close(remove=True)
    late.join()
    assert tree(tmp_path) == set()
