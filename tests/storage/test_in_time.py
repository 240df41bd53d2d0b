"""Calls to a disk that does not answer are given up in time, in set-up, recovery, scrubs and lists of jobs, too."""

from __future__ import annotations

import _thread
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from lightning_smartinfinity import native
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage import PARAMETERS, TensorStore, measure_tensor_space, recover_store
from lightning_smartinfinity.storage.folders.replacement import flush_tree
from lightning_smartinfinity.storage.io import deadlines, files
from lightning_smartinfinity.storage.io import deadlines as calls
from lightning_smartinfinity.storage.io.deadlines import (
    completed_requests,
    counters_of,
    doing_now,
    in_time,
    io_limit,
    when_returned,
)
from lightning_smartinfinity.storage.io.exit import exit_beside
from lightning_smartinfinity.storage.io.files import unless_removed
from lightning_smartinfinity.storage.jobs import jobs
from lightning_smartinfinity.storage.state import scrub, state_store
from lightning_smartinfinity.zero3.optimizer.earlier_state import KeptMasters
from tests.helpers.attacks import Attack
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import REPOSITORY
from tests.helpers.silent_disk import ERROR, SAID, SECONDS, SilentDisk, gives_up
from tests.helpers.waiting import LIMIT, await_that, lenient
from tests.native.test_deadlines import interrupted
from tests.storage.makers import commit_generation, create, left, recovered, tree, write_generation

strictly = partial(in_time, renews=False)


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """Return an event for which calls wait; it comes at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_a_name_that_an_nfs_mount_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is made again for longer than NFS caches by default that the old one is there (60 seconds)."""
    monkeypatch.setattr(files, "time", Mock(monotonic=Mock(side_effect=itertools.count())))
    assert unless_removed(Mock(side_effect=[FileNotFoundError] * 60 + ["made"])) == "made"
    with pytest.raises(FileNotFoundError):
        unless_removed(Mock(side_effect=FileNotFoundError))


@pytest.mark.parametrize(
    ("ending", "function"),
    [
        (lambda: pytest.raises(ZeroDivisionError), Mock(side_effect=ZeroDivisionError)),
        (interrupted, lambda: time.sleep(0.3)),
    ],
    ids=["an error", "an interrupt"],
)
def test_what_raises_keeps_nothing(
    tmp_path: Path, ending: Callable[[], AbstractContextManager[Any]], function: Callable[[], None]
) -> None:
    """Objects to which callers referred are gone without the garbage collector."""

    def refer() -> weakref.ref[threading.Event]:
        held = threading.Event()
        with ending():
            strictly(function, doing="Asking", path=tmp_path / "file")
        return weakref.ref(held)

    gc.disable()
    try:
        assert refer()() is None
    finally:
        gc.enable()


def test_files_that_the_garbage_collector_closes(tmp_path: Path) -> None:
    """It may do so in the thread that looks for calls which have not returned."""
    with calls._abandoned_lock:
        assert strictly(lambda: 7, doing="Closing", path=tmp_path / "file") == 7


def test_what_does_not_return(tmp_path: Path, answer: threading.Event) -> None:
    """The error has the path and the seconds. Later calls for the folder are refused until the first returns."""
    seconds, path = lenient(0.2), tmp_path / "a" / "file"
    with pytest.raises(StorageTimeoutError, match=f"Flushing '{path}' did not return within {seconds:g} s.*io_timeout"):
        strictly(answer.wait, doing="Flushing", path=path, seconds=seconds)
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
    """A call that waits for its disk's numbers when it is given up does nothing later, and holds what it may use.

    It holds nothing of what is begun after it was given up.
    """
    monkeypatch.setattr(calls, "counters_of", lambda path: answer.wait() and None)
    done, released, begun_later, before = [], [], [], time.monotonic()
    with pytest.raises(StorageTimeoutError):
        in_time(lambda: done.append(1), doing="Writing", path=tmp_path / "a" / "file", seconds=0.2)
    when_returned(lambda: released.append(1), since=before)
    when_returned(lambda: begun_later.append(1), since=time.monotonic())
    time.sleep(0.1)
    assert not released and begun_later
    answer.set()
    await_that(lambda: bool(released))
    assert not done
    when_returned(lambda: released.append(2), since=before)
    assert released == [1, 2]


def test_a_thread_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that finds no memory for its first steps is given up as a call that does not return is."""
    begin = Mock(side_effect=MemoryError)
    monkeypatch.setattr(threading.Thread, "_bootstrap", begin)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    assert strictly(lambda: 7, doing="Asking", path=tmp_path / "a" / "file") == 7
    monkeypatch.setattr(calls._Call, "make", begin)
    monkeypatch.setattr(calls, "_abandoned", [])  # this process does not have the thread, and may end without it
    with pytest.raises(StorageTimeoutError, match="did not return"):
        strictly(lambda: 7, doing="Asking", path=tmp_path / "b" / "file", seconds=0.2)


def test_an_interrupt_does_not_cut_short_what_returns(tmp_path: Path) -> None:
    """After Ctrl-C a call gets a few more seconds."""
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
    for later in (store.require_usable, partial(store.close, remove=True)):
        with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
            later()


def test_a_disk_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: SilentDisk) -> None:
    """A call that lasts many times the limit returns if its disk completes requests all the time.

    Forty limits end it, whatever the disk does for others, and Ctrl-C ends it within seconds.
    """
    counts, seconds = itertools.count(), 0.1  # by then even a busy machine has begun the call

    def count(_: Path) -> int:
        if (number := next(counts)) == 60:
            disk.answers.set()
        return number

    monkeypatch.setattr(calls, "completed_requests", count)
    monkeypatch.setattr(calls, "_POLL", seconds / 10)
    assert in_time(disk.answers.wait, doing="Flushing", path=tmp_path / "a", seconds=seconds)
    disk.answers.clear()
    began = time.monotonic()
    with pytest.raises(StorageTimeoutError):
        in_time(disk.answers.wait, doing="Flushing", path=tmp_path / "b" / "c", seconds=seconds)
    assert time.monotonic() - began > 40 * seconds
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
    monkeypatch.setattr(native, "note_abandoned", waited.append)
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


def test_what_comes_too_late_is_undone(tmp_path: Path, disk: SilentDisk) -> None:
    """A result is undone if it comes after the call was given up or interrupted; otherwise the caller has it."""
    undone: list[object] = []
    opening = partial(in_time, doing="Opening", path=tmp_path / "a", undo=undone.append)
    with pytest.raises(StorageTimeoutError):
        opening(disk.answers.wait, seconds=SECONDS)
    assert not undone
    disk.answer()
    assert undone == [True]
    with interrupted():
        opening(lambda: time.sleep(0.5))
    assert undone == [True, None] and opening(lambda: 7) == 7 and undone == [True, None]


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


# ---- set-up, recovery, scrubs and lists of jobs end in time, and leave nothing by halves


def measure(storage: list[Path]) -> None:
    with io_limit(SECONDS):
        measure_tensor_space(storage, sizes=[1], what=PARAMETERS)


recover = partial(recover_store, io_timeout=SECONDS)
create_tensors = partial(TensorStore, job="default", direct_io="auto", io_timeout=SECONDS)


STATE = "default/rank-00000/state.bin"


@pytest.mark.parametrize(
    ("name", "call", "doing", "of"),
    [
        pytest.param(
            "posix_fallocate", partial(create, io_timeout=SECONDS), r"Allocating \d+ bytes for", STATE, id="allocating"
        ),
        pytest.param("statvfs", measure, "Looking for free space in", "", id="free space"),
        pytest.param("fchmod", create_tensors, "Creating a file in", "default", id="file for parameters"),
        pytest.param("pread", recover, "Reading", STATE, id="recovery"),
    ],
)
def test_set_up_and_recovery(
    name: str, call: Callable[..., object], doing: str, of: str, tmp_path: Path, disk: SilentDisk, attack: Attack
) -> None:
    """The error names file or folder, and later calls are refused. Once the disk answers, all is as it was before."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    storage = tmp_path / "storage"
    storage.mkdir()
    if call is recover:
        left(storage)
    before = tree(storage)

    def concerns(asked: object, *_: object) -> bool:
        return name != "pread" or os.readlink(f"/proc/self/fd/{asked}") == str(storage / STATE)

    disk.hang(os, name, when=concerns)
    with gives_up(storage / of, doing):
        call([storage])
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        call([storage])
    disk.answer()
    assert tree(storage) == before
    assert call is not recover or recovered(storage) == 0


def test_files_that_do_not_grow(tmp_path: Path, disk: SilentDisk, attack: Attack) -> None:
    """A store that is to be spread anew over its folders ends in time, and its tasklets stay where they are."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders, io_timeout=SECONDS)
    before = store.counts
    disk.hang(os, "posix_fallocate")
    with gives_up(folders[0] / "default" / "rank-00000" / "state.bin", r"Extending to \d+ bytes"):
        store.spread([sum(before), 0])
    assert store.counts == before
    disk.answer()
    store.close(remove=True)


SCRUB = ("a disk stops answering while a checkpoint or state is scrubbed", SAID)
JOBS = ("a disk stops answering while jobs are listed or removed", ERROR)


@pytest.mark.parametrize(
    ("module", "name", "command", "row"),
    [
        (jobs, "find_jobs", ["scrub"], SCRUB),
        (scrub, "_newest", ["scrub"], SCRUB),
        (os, "scandir", ["jobs"], JOBS),
        (os, "unlink", ["jobs", "--remove", "default"], JOBS),
    ],
)
def test_commands_whose_disk_does_not_answer(
    module: Any,
    name: str,
    command: list[str],
    row: tuple[str, str],
    tmp_path: Path,
    disk: SilentDisk,
    attack: Attack,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A scrub says that it cannot tell. The list of jobs, and the removal of one, end. Both name the folder."""
    attack(row[0], tries=1, outcome=row[1])
    left(tmp_path, world_size=1)
    disk.works_until_it_hangs()
    disk.hang(module, name)
    with io_limit(SECONDS):
        status = main([command[0], str(tmp_path), "--quiet", *command[1:]])
    assert status == 2 if row == SCRUB else status != 0
    assert disk.hung == 1 and f"did nothing for {SECONDS} s" in capsys.readouterr().err
    disk.answer()


def test_jobs_beside_a_disk_that_does_not_answer(
    tmp_path: Path, disk: SilentDisk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs of the other folders are listed, and the exit status says that some are unknown."""
    folders = [tmp_path / name for name in ("dead", "works")]
    for folder in folders:
        left(folder, world_size=1)
    (tmp_path / "mounts").write_text(f"/dev/a {folders[0]} ext4 rw 0 0\n")
    monkeypatch.setattr(calls, "_MOUNTS", tmp_path / "mounts")
    disk.hang(os, "scandir", when=lambda path, *_: path == folders[0])
    with io_limit(SECONDS):
        assert main(["jobs", *map(str, folders), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert f"'{folders[0]}' did not return" in err and str(folders[1] / "default") in out
    disk.answer()


# ---- the kernel's counters, which tell whether a disk still answers

# As Linux writes it since 5.5: reads, merges, sectors, time; writes, merges, sectors, time; in flight, times;
# discards, merges, sectors, time; flushes, time.
STAT = " 638158 36241 107285 960 837820 520424 153758 394 0 205 1454 520067 96 76521 86 97945 12"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (STAT, 638158 + 837820 + 520067 + 97945),
        ("5 0 80 1 7 0 90 2 0 3 3\n", 12),
        ("", None),
        ("x", None),
        (None, None),
    ],
)
def test_counted_requests(tmp_path: Path, content: str | None, found: int | None) -> None:
    """Reads, writes, discards and flushes that the device has completed count; older kernels count the first two."""
    counters = tmp_path / "stat"
    if content is not None:
        counters.write_text(content)
    assert completed_requests(counters) == found


def test_counters_of_a_path(tmp_path: Path) -> None:
    """They are those of the device, or partition, on which a path will lie; what has no device has none."""
    devices, device = tmp_path / "devices", os.stat(tmp_path).st_dev
    missing, folder = tmp_path / "a" / "b", devices / f"{os.major(device)}:{os.minor(device)}"
    assert counters_of(missing, devices=devices) is None
    folder.mkdir(parents=True)
    (folder / "stat").write_text(STAT)
    assert counters_of(missing, devices=devices) == counters_of(tmp_path, devices=devices) == folder / "stat"


# ---- a process whose calls were given up ends when its program does, with the status that it would have had


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
    kept = list[int]()
    monkeypatch.setattr(native, "keep_at_exit", lambda objects: kept.append(len(objects)))
    monkeypatch.setattr(_thread, "start_new_thread", Mock(side_effect=error))
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
