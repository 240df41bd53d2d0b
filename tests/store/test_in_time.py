"""Calls to a disk that does not answer are given up in time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.store import in_time as calls
from lightning_smartinfinity.store import state_store
from lightning_smartinfinity.store.in_time import in_time, unless_idle, when_returned
from tests.helpers.waiting import LIMIT, await_that, lenient
from tests.native.test_interrupt import interrupted
from tests.store.makers import commit_generation, create, write_generation


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """Return an event for which calls wait; it comes at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_what_returns(tmp_path: Path) -> None:
    """The result, or the error, is that of the function."""
    assert in_time(lambda: 7, doing="Asking", path=tmp_path / "file") == 7
    with pytest.raises(OSError, match="gone"):
        in_time(lambda: (_ for _ in ()).throw(OSError("gone")), doing="Asking", path=tmp_path / "file")


def test_what_does_not_return(tmp_path: Path, answer: threading.Event) -> None:
    """The error has the path and the seconds. Later calls for the folder are refused until the first returns."""
    seconds, path = lenient(0.2), tmp_path / "a" / "file"
    with pytest.raises(StorageTimeoutError, match=f"Flushing '{path}' did not return within {seconds:g} s") as caught:
        in_time(answer.wait, doing="Flushing", path=path, seconds=seconds)
    assert "io_timeout" in caught.value.remedy
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        in_time(lambda: 7, doing="Asking", path=path)
    assert in_time(lambda: 7, doing="Asking", path=tmp_path / "b" / "file") == 7
    answer.set()

    def answers() -> bool:
        try:
            return in_time(lambda: 7, doing="Asking", path=path) == 7
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
        unless_idle(lambda: done.append(1), doing="Writing", path=tmp_path / "a" / "file", seconds=0.2)
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
    assert in_time(lambda: 7, doing="Asking", path=tmp_path / "a" / "file") == 7
    monkeypatch.setattr(calls._Call, "make", begin)
    with pytest.raises(StorageTimeoutError, match="did not return"):
        in_time(lambda: 7, doing="Asking", path=tmp_path / "b" / "file", seconds=0.2)


def test_an_interrupt_shortens_the_wait(tmp_path: Path, answer: threading.Event) -> None:
    """After Ctrl-C a call gets three more seconds. One that returns is not cut short."""
    with interrupted():
        in_time(answer.wait, doing="Asking", path=tmp_path / "a" / "file", seconds=10 * LIMIT)
    done = []
    with interrupted():
        in_time(lambda: (time.sleep(0.5), done.append(1)), doing="Asking", path=tmp_path / "b" / "file")
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
