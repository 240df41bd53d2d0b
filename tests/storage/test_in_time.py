"""Calls to a disk that does not answer are given up in time."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage.folders.replacement import flush_tree
from lightning_smartinfinity.storage.folders.staging_folder import locked
from lightning_smartinfinity.storage.io import deadlines as calls
from lightning_smartinfinity.storage.io.deadlines import doing_now, in_time, io_limit, when_returned
from lightning_smartinfinity.storage.state import state_store
from tests.helpers.silent_disk import SECONDS, SilentDisk, gives_up
from tests.helpers.waiting import LIMIT, await_that, lenient
from tests.native.test_interrupt import interrupted
from tests.storage.makers import commit_generation, create, write_generation

strictly = partial(in_time, renews=False)


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """Return an event for which calls wait; it comes at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


class Held:
    """Something that a caller refers to."""


def ends_in_an_error(path: Path) -> weakref.ref[Held]:
    held = Held()
    with suppress(OSError):
        strictly(lambda: (_ for _ in ()).throw(OSError("gone")), doing="Asking", path=path)
    return weakref.ref(held)


def ends_by_an_interrupt(path: Path) -> weakref.ref[Held]:
    held = Held()
    with interrupted():
        strictly(lambda: time.sleep(0.3), doing="Asking", path=path)
    return weakref.ref(held)


@pytest.mark.parametrize("call", [ends_in_an_error, ends_by_an_interrupt])
def test_what_raises_keeps_nothing(tmp_path: Path, call: Callable[[Path], weakref.ref[Held]]) -> None:
    """Objects to which callers referred are gone without the garbage collector."""
    gc.disable()
    try:
        assert call(tmp_path / "file")() is None
    finally:
        gc.enable()


def test_files_that_the_garbage_collector_closes(tmp_path: Path) -> None:
    """It may do so in the thread that looks for calls which have not returned."""
    with calls._given_up_lock:
        assert strictly(lambda: 7, doing="Closing", path=tmp_path / "file") == 7


def test_what_does_not_return(tmp_path: Path, answer: threading.Event) -> None:
    """The error has the path and the seconds. Later calls for the folder are refused until the first returns."""
    seconds, path = lenient(0.2), tmp_path / "a" / "file"
    with pytest.raises(StorageTimeoutError, match=f"Flushing '{path}' did not return within {seconds:g} s") as caught:
        strictly(answer.wait, doing="Flushing", path=path, seconds=seconds)
    assert "io_timeout" in caught.value.remedy
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        strictly(lambda: 7, doing="Asking", path=path)
    assert strictly(lambda: 7, doing="Asking", path=tmp_path / "b" / "file") == 7
    answer.set()

    def answers() -> bool:
        try:
            return strictly(lambda: 7, doing="Asking", path=path) == 7
        except StorageTimeoutError:
            return False

    await_that(answers)


def test_what_was_given_up_before_it_began(
    tmp_path: Path, answer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waits for its disk's numbers when it is given up does nothing later, and holds what it may use."""
    monkeypatch.setattr(calls, "counters_of", lambda path: answer.wait() and None)
    done, released, before = [], [], time.monotonic()
    with pytest.raises(StorageTimeoutError):
        in_time(lambda: done.append(1), doing="Writing", path=tmp_path / "a" / "file", seconds=0.2)
    when_returned(lambda: released.append(1), since=before)
    time.sleep(0.1)
    assert not released
    answer.set()
    await_that(lambda: bool(released))
    assert not done
    when_returned(lambda: released.append(2), since=before)
    assert released == [1, 2]


def test_a_thread_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that finds no memory for its first steps is given up as a call that does not return is."""

    def begin(self: object) -> None:
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "_bootstrap", begin)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    assert strictly(lambda: 7, doing="Asking", path=tmp_path / "a" / "file") == 7
    monkeypatch.setattr(calls._Call, "make", begin)
    with pytest.raises(StorageTimeoutError, match="did not return"):
        strictly(lambda: 7, doing="Asking", path=tmp_path / "b" / "file", seconds=0.2)


def test_an_interrupt_shortens_the_wait(tmp_path: Path, answer: threading.Event) -> None:
    """After Ctrl-C a call gets three more seconds. One that returns is not cut short."""
    with interrupted():
        strictly(answer.wait, doing="Asking", path=tmp_path / "a" / "file", seconds=10 * LIMIT)
    done = []
    with interrupted():
        strictly(lambda: (time.sleep(0.5), done.append(1)), doing="Asking", path=tmp_path / "b" / "file")
    assert done == [1]


def test_a_commit_record_that_is_not_written(
    tmp_path: Path, answer: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit fails, and no generation can be written any more; closing returns, too."""
    store = create([tmp_path], io_timeout=lenient(0.2))
    monkeypatch.setattr(store._in_time, "_are_direct", True)
    commit_generation(store, 0)
    placement = write_generation(store, 1)
    monkeypatch.setattr(state_store, "write_record", lambda *_, **__: answer.wait())
    with pytest.raises(StorageTimeoutError, match=r"Writing the commit record .*commit\.bin' did not return within"):
        store.commit(
            generation=1,
            placement=placement,
            tasklet_generations=np.full(store.extents.num_tasklets, 1, np.int64),
            steps=np.full(len(store.steps), 1, np.int64),
        )
    assert store.generation == 0
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        store.require_usable()
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        store.close(remove=True)


def test_a_disk_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: SilentDisk) -> None:
    """A call that lasts many times the limit returns if its disk completes requests all the time.

    Forty limits end it, whatever the disk does for others, and Ctrl-C ends it within seconds.
    """
    counts = itertools.count()

    def count(_: Path) -> int:
        if (number := next(counts)) == 20:
            disk.answers.set()
        return number

    monkeypatch.setattr(calls, "completed_requests", count)
    assert in_time(disk.answers.wait, doing="Flushing", path=tmp_path / "a", seconds=0.1)
    disk.answers.clear()
    began = time.monotonic()
    with pytest.raises(StorageTimeoutError):
        in_time(disk.answers.wait, doing="Flushing", path=tmp_path / "b" / "c", seconds=0.1)
    assert time.monotonic() - began > 40 * 0.1
    with interrupted():
        in_time(disk.answers.wait, doing="Flushing", path=tmp_path / "d" / "e", seconds=10 * LIMIT)


@pytest.mark.parametrize("counted", [True, False])
def test_a_process_that_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: SilentDisk, request: pytest.FixtureRequest, counted: bool
) -> None:
    """After SIGTERM the limit is not renewed, whatever the disk does for others, nor longer where nobody can tell."""
    numbers = itertools.count()
    if not counted:
        monkeypatch.setattr(calls, "counters_of", lambda _: None)
    monkeypatch.setattr(calls, "completed_requests", lambda _: next(numbers))
    request.addfinalizer(native.take_back_ask_to_end)
    waited: list[float] = []
    monkeypatch.setattr(native, "note_given_up", waited.append)
    native.ask_to_end()
    with pytest.raises(StorageTimeoutError):
        in_time(disk.answers.wait, doing="Flushing", path=tmp_path / "a", seconds=0.5)
    assert 0.5 <= waited[0] <= 0.6


def test_another_disk_beside_one_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: SilentDisk
) -> None:
    """A disk that is mounted in the same folder as a dead one is asked all the same."""
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(calls, "_MOUNTS", mounts)
    first, second = tmp_path / "first disk", tmp_path / "second"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\n/dev/b {first} ext4 rw 0 0\n".replace("first disk", "first\\040disk"))
    with pytest.raises(StorageTimeoutError):
        in_time(disk.answers.wait, doing="Looking at", path=first, seconds=SECONDS)
    assert in_time(lambda: 7, doing="Looking at", path=second) == 7
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        in_time(lambda: 7, doing="Looking at", path=first)


def test_a_save_after_a_disk_that_does_not_answer(tmp_path: Path, disk: SilentDisk) -> None:
    """A call that was given up on another disk keeps no lock of a later save."""
    with pytest.raises(StorageTimeoutError):
        in_time(disk.answers.wait, doing="Reading", path=tmp_path / "other" / "a", seconds=SECONDS)
    with locked(tmp_path / "staging", tmp_path / "target") as lock:
        lock.leaves_content = True
    with locked(tmp_path / "staging", tmp_path / "target"):
        pass
    assert not (tmp_path / "staging").exists()


def test_what_comes_too_late_is_undone(tmp_path: Path, disk: SilentDisk) -> None:
    """A result is undone if it comes after the call was given up or interrupted; otherwise the caller has it."""
    undone: list[object] = []
    with pytest.raises(StorageTimeoutError):
        in_time(disk.answers.wait, doing="Opening", path=tmp_path / "a", seconds=SECONDS, undo=undone.append)
    assert not undone
    disk.answer()
    assert undone == [True]
    with interrupted():
        in_time(lambda: time.sleep(0.5), doing="Opening", path=tmp_path / "a", undo=undone.append)
    assert undone == [True, None]
    assert in_time(lambda: 7, doing="Opening", path=tmp_path / "a", undo=undone.append) == 7
    assert undone == [True, None]


def test_a_call_of_many_steps(tmp_path: Path, disk: SilentDisk) -> None:
    """Each step has the whole limit; the error is about the last one."""
    disk.hang(os, "sync")
    begun: list[int] = []

    def work() -> None:
        for number in range(8):
            begun.append(number)
            with doing_now(f"Step {number} of", tmp_path / "file"):
                threading.Event().wait(SECONDS / 2)
        with doing_now("Flushing", tmp_path / "file"):
            os.sync()

    with gives_up(tmp_path / "file", "Flushing"):
        in_time(work, doing="Working on", path=tmp_path / "file", seconds=SECONDS)
    assert len(begun) == 8


def test_a_disk_that_nobody_can_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: SilentDisk) -> None:
    """Where the system counts no requests, the limit is ten times as long."""
    disk.hang(os, "fsync")
    monkeypatch.setattr(calls, "counters_of", lambda path: None)
    (tmp_path / "file").touch()
    seconds = lenient(0.1)
    told = rf"Flushing '.*/file' did not return within {10 * seconds:g} s"
    with pytest.raises(StorageTimeoutError, match=told), io_limit(seconds):
        flush_tree(tmp_path / "file")
