"""A process whose calls were given up ends when its program does, with the status that it would have had."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage.io import deadlines
from lightning_smartinfinity.storage.io.exit import exit_beside
from lightning_smartinfinity.zero3.optimizer.earlier_state import KeptMasters
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import REPOSITORY
from tests.helpers.waiting import LIMIT, await_that

STATUS = {
    "returns": 0,
    "thread": 0,
    "late": 0,
    "answered": 0,
    "3": 3,
    "text": 1,
    "error": 1,
    "interrupt": -signal.SIGINT,
}
PRINTED = {"text": "text", "error": "ValueError: wrong", "interrupt": "KeyboardInterrupt", "thread": "worked"}

_LAYOUT = SimpleNamespace(tasklets=[], extents=SimpleNamespace(tasklet_numel=1), parameters=[])
WITHOUT_PARAMETERS: Any = SimpleNamespace(
    partition=SimpleNamespace(layout=_LAYOUT, params=list),
    rank_state=SimpleNamespace(handler=SimpleNamespace(state=None)),
    storage_folder=None,
)


def test_a_process_ends_beside_a_call_that_was_given_up(tmp_path: Path) -> None:
    """It destroys nothing that would wait for the disk, but runs exit handlers, waits for threads and flushes files.

    It says which call has not returned. If all have, it ends as always. A forked process has no such calls.
    """
    started = {}
    for end in STATUS:
        command = [sys.executable, "-m", "tests.storage.exit_worker", end, str(tmp_path / end)]
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[end] = subprocess.Popen(command, cwd=REPOSITORY, env=fresh_environment(), **output)
    for end, process in started.items():
        printed, told = process.communicate(timeout=LIMIT)
        assert process.returncode == STATUS[end], told
        assert PRINTED.get(end, "") in printed + told
        assert "the child has []\n" in printed and "atexit\n" in printed
        assert (tmp_path / end).read_text() == "written"
        assert ("destroyed" in printed) == (end == "answered")
        reported = f"process {process.pid} ends, but has calls to storage that have not returned: Reading '/disk/file'."
        assert (reported in told) == (end != "answered")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_process_that_cannot_flush(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another thread, or after a second Ctrl-C, it keeps its objects alive all the same."""

    def start_new_thread(*_: Any) -> None:
        raise error

    kept = list[int]()
    monkeypatch.setattr(native, "keep_at_exit", lambda objects: kept.append(len(objects)))
    monkeypatch.setattr(_thread, "start_new_thread", start_new_thread)
    ends = pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext()
    with open(tmp_path / "open", "w"), ends:
        exit_beside(["Reading '/disk/file'"])
    assert kept == [3]


def test_a_finalizer_does_not_wait_beside_a_call_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes its file in another thread, and in its own again once the call has returned."""
    answer, closed, threads = threading.Event(), threading.Event(), []

    def close() -> None:
        threads.append(threading.get_ident())
        assert answer.wait(LIMIT)
        closed.set()

    with pytest.raises(StorageTimeoutError):
        deadlines.in_time(answer.wait, doing="Reading", path=tmp_path, seconds=0.05, renews=False)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: SimpleNamespace(close=close))
    kept = KeptMasters()
    kept.keep(WITHOUT_PARAMETERS)
    del kept
    answer.set()
    assert closed.wait(LIMIT) and threads != [threading.get_ident()]
    await_that(lambda: not deadlines._unreturned())
    deadlines.apart(close)
    assert threads[1:] == [threading.get_ident()]


@pytest.mark.parametrize(
    ("number", "told"), [(1, "1 request to drives or cards"), (2, "2 requests to drives or cards")]
)
def test_native_calls_are_counted(number: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the native core that have not returned are reported as a number."""
    monkeypatch.setattr(native, "num_abandoned_calls", lambda: deadlines._num_before_fork + number)
    assert deadlines._unreturned()[-1] == told


def test_a_finalizer_fails(tmp_path: Path) -> None:
    """What cannot be closed any more is no error of the code that is running then."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.close(descriptor)
    deadlines.apart(lambda: os.close(descriptor))
