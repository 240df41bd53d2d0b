"""Requests that a disk does not answer are given up in time, and keep the memory that they may still use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import (
    Failure,
    FileQueue,
    HostBuffer,
    Operation,
    StateFile,
    ask_to_end,
    ending_seconds,
    io_engines,
    note_given_up,
)
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.golden import adam_step
from tests.helpers.native_testing import EndingClock, Hold, inject
from tests.helpers.processes import REPOSITORY
from tests.helpers.waiting import LIMIT, PROCESS_LIMIT, await_that, lenient
from tests.native.stored import Run, StoredState
from tests.native.test_pipeline import adam, assert_same, initial, normals

BLOCK = 4096
PART = 4 << 20  # a request is cut into parts of this size
NUMEL = 4 * 1024
STEP = adam_step()
# Longer than a test may take, so that only ask_to_end() can end a wait.
ENDLESS = round(1000 * 10 * LIMIT)


def file_of(folder: Path, num_blocks: int = 4) -> StateFile:
    (folder / "file").write_bytes(b"".join(bytes([number]) * BLOCK for number in range(num_blocks)))
    return StateFile(str(folder / "file"), direct=False)


def read(queue: FileQueue, file: StateFile, memory: HostBuffer, block: int) -> Failure | None:
    return queue.wait(queue.read(file, offset=block * BLOCK, address=memory.address, nbytes=BLOCK))


@pytest.mark.parametrize("engine", [name for name, unavailable in io_engines() if not unavailable])
def test_a_request_that_is_not_answered(tmp_path: Path, engine: str) -> None:
    """It fails with path, offset and seconds. Until it returns, the queue refuses others; then it works again."""
    file, memory = file_of(tmp_path), HostBuffer(BLOCK)
    seconds = lenient()
    queue = FileQueue(io_engine=engine, timeout_ms=round(1000 * seconds))
    hold = Hold(queue, read_at=0)
    failure = read(queue, file, memory, 1)
    assert failure is not None and failure.kind == "timeout"
    assert (failure.path, failure.offset) == (file.path, BLOCK)
    assert failure.message == (
        f"reading {BLOCK} bytes at offset {BLOCK} of {file.path} did not return within {seconds:g} s"
    )
    assert queue.busy
    refused = read(queue, file, HostBuffer(BLOCK), 2)
    assert refused is not None and refused.kind == "timeout"
    assert refused.message.endswith("was refused, since an earlier request has not returned")
    hold.release()
    await_that(lambda: not queue.busy)
    assert read(queue, file, memory, 3) is None
    assert bytes(memory.memoryview()) == bytes([3]) * BLOCK


def test_a_batch_that_is_not_answered(tmp_path: Path) -> None:
    """The batch fails, none can follow before the write has returned, and what is read is as before."""
    arrays = initial(NUMEL)
    seconds = lenient()
    with StoredState(tmp_path, NUMEL, 1024, options={"timeout_ms": round(1000 * seconds)}) as state:
        state.write(*arrays)
        hold = Hold(state.pipeline, write_at=1)
        parameter = np.zeros(NUMEL, np.float32)
        runs = [Run(0, NUMEL, 0, normals(9, NUMEL), parameter=parameter)]
        state.start(Operation.UPDATE, runs, [STEP])
        failure = state.pipeline.finish()
        assert failure is not None and failure.kind == "timeout"
        assert failure.message.startswith("writing ")
        assert failure.message.endswith(f"(tasklet {failure.tasklet}) did not return within {seconds:g} s")
        assert state.pipeline.busy and len(state.pipeline.writes_out()) == 1
        with pytest.raises(ValueError, match="has not returned"):
            state.start(Operation.UPDATE, runs, [STEP])
        hold.release()
        await_that(lambda: not state.pipeline.busy)
        assert_same(state.read(), arrays)


def test_what_waits_behind_others_is_not_late(tmp_path: Path) -> None:
    """Requests that queue up for longer than the limit are not given up while those before them return."""
    file, memory = file_of(tmp_path), HostBuffer(BLOCK)
    seconds = lenient(0.3)
    queue = FileQueue(io_threads=1, io_engine="threads", timeout_ms=round(1000 * seconds))
    inject(queue, seed=1, max_delay_us=round(seconds * 4e5))
    begin = time.monotonic()
    tickets = [queue.read(file, offset=0, address=memory.address, nbytes=BLOCK) for _ in range(12)]
    assert [queue.wait(ticket) for ticket in tickets] == [None] * len(tickets)
    assert time.monotonic() - begin > seconds, "the requests took less time than one may take"


def test_a_part_that_fails_before_another_is_not_answered(tmp_path: Path) -> None:
    """The request tells of the part that is not answered, since its memory is still in use."""
    file, memory = file_of(tmp_path), HostBuffer(2 * PART)
    os.truncate(file.path, 2 * PART)
    queue = FileQueue(timeout_ms=round(1000 * lenient()))
    inject(queue, fail_read_at=0)
    hold = Hold(queue, read_at=1)
    failure = queue.wait(queue.read(file, offset=0, address=memory.address, nbytes=2 * PART))
    assert failure is not None and failure.kind == "timeout" and queue.busy
    hold.release()
    await_that(lambda: not queue.busy)


PAUSED = """
import sys
from pathlib import Path
from lightning_smartinfinity.native import FileQueue, HostBuffer, StateFile
from lightning_smartinfinity.storage.io.deadlines import in_time
from tests.helpers.native_testing import Hold

path, seconds = Path(sys.argv[1]), float(sys.argv[2])
queue, memory = FileQueue(timeout_ms=round(1000 * seconds)), HostBuffer(4096)
hold = Hold(queue, read_at=0)
ticket = queue.read(StateFile(str(path), direct=False), offset=0, address=memory.address, nbytes=4096)
print("reading", flush=True)
in_time(sys.stdin.readline, doing="Reading", path=path, seconds=seconds)
hold.release()
print(queue.wait(ticket))
"""


def test_a_process_that_was_paused(tmp_path: Path) -> None:
    """The time for which a process was stopped, as by a debugger, makes neither a request nor a call late."""
    file_of(tmp_path)
    seconds = lenient(1)
    command = [sys.executable, "-c", PAUSED, tmp_path / "file", str(seconds)]
    pipe, environment = subprocess.PIPE, fresh_environment()
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == "reading\n"
            child.send_signal(signal.SIGSTOP)
            time.sleep(1.5 * seconds)
            child.send_signal(signal.SIGCONT)
            time.sleep(seconds / 4)
            assert child.communicate("\n", PROCESS_LIMIT)[0] == "None\n"
        finally:
            child.kill()


def test_closing_while_a_request_is_not_answered(tmp_path: Path) -> None:
    """close() waits no longer than the limit. What the request may use stays until it returns, after close()."""
    queue, memory = FileQueue(timeout_ms=round(1000 * lenient())), HostBuffer(BLOCK)
    hold = Hold(queue, read_at=0)
    file = file_of(tmp_path)
    queue.read(file, offset=0, address=memory.address, nbytes=BLOCK)
    queue.close()
    file.close()
    assert hold.count == 1
    hold.release()


@pytest.mark.parametrize("asks", ["Ctrl-C", "ask_to_end"])
def test_the_end_of_the_process_is_asked_for(tmp_path: Path, asks: str) -> None:
    """Limits are three seconds then: a batch that waits for a disk for ever stops, without holding Python's lock."""
    with StoredState(tmp_path, NUMEL, 1024, options={"timeout_ms": ENDLESS}) as state:
        state.write(*initial(NUMEL))
        hold = Hold(state.pipeline, read_at=0)
        state.start(Operation.UPDATE, [Run(0, NUMEL, 0, normals(9, NUMEL))], [STEP])
        if asks == "Ctrl-C":
            with interrupted():
                state.pipeline.finish()
            state.pipeline.stop()
        else:
            threading.Timer(0.1, ask_to_end).start()
            failure = state.pipeline.finish()
            assert failure is not None and failure.message.endswith("did not return within 3 s")
        assert hold.count == 1 and state.pipeline.busy
        hold.release()
        await_that(lambda: not state.pipeline.busy)


# ---- a process that is asked to end waits for dead disks within one limit, however many of them there are

FIRST, LATER, LEAST, LASTS = 3.0, 1.0, 0.1, 10.0


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(
            [("abandon", 0.0, 60.0), (60.0, None), ("ask", 61.0), (61.0, (FIRST, 61.0))],
            id="nobody asked: one that is given up shortens no other",
        ),
        pytest.param(
            [("ask", 100.0), *((now, (FIRST, 100.0)) for now in (100.0, 104.0, 109.9))],
            id="waits that are answered have three seconds each",
        ),
        pytest.param(
            [
                ("ask", 100.0),
                *(("abandon", 99.0, 103.0), (103.0, (LATER, 103.0))),
                *(("abandon", 103.5, 103.9), (104.0, (pytest.approx(0.6), 103.9))),
                *(("abandon", 104.0, 105.0), (105.0, (LEAST, 105.0))),
            ],
            id="later ones share a second, and have a moment when it is spent",
        ),
        pytest.param(
            [
                ("ask", 100.0),
                *(*5 * [("abandon", 100.0, 103.0)], (103.0, (LATER, 103.0))),
                *(*5 * [("abandon", 103.0, 103.25)], (103.25, (0.75, 103.25))),
            ],
            id="waits at the same time count once",
        ),
        pytest.param(
            [
                *(("ask", 100.0), ("abandon", 100.0, 103.0), ("ask", 108.0)),
                *((108.0 + LASTS - 0.1, (LATER, 103.0)), (108.0 + LASTS, None)),
                *(("ask", 130.0), (130.0, (FIRST, 130.0))),
            ],
            id="asked again: limits last longer, and do not start anew",
        ),
        pytest.param(
            [
                *(("ask", 100.0), ("abandon", 100.0, 103.0), ("take_back",), (103.0, None)),
                *(("ask", 104.0), (104.0, (FIRST, 104.0))),
            ],
            id="taken back",
        ),
    ],
)
def test_limits(events: list[tuple[Any, ...]]) -> None:
    """After each event, or at each time, the limit of a wait and its begin are these."""
    clock = EndingClock()
    for first, *rest in events:
        if isinstance(first, str):
            getattr(clock, first)(*rest)
        else:
            assert [clock.limit(first)] == rest


@given(
    pauses=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 4)), max_size=20),
    started=st.floats(0, 1),
)
def test_any_number_of_dead_disks(pauses: list[tuple[float, int]], started: float) -> None:
    """All waits together take the two limits and a moment each, whatever is done between them."""
    clock = EndingClock()
    clock.ask(0.0)
    now, waited = started, 0.0
    for pause, at_once in [(0.0, 1), *pauses]:
        now += pause
        begun, limit = now, clock.limit(now)
        if limit is None:
            return
        time, since = limit
        now = max(begun, since) + time
        waited += now - begun
        for _ in range(at_once):
            clock.abandon(begun, now)
    assert waited <= FIRST + LATER + LEAST * len(pauses) + 0.01


def test_calls_and_requests_ask_the_same_clock(tmp_path: Path) -> None:
    """A call to a file system that was given up leaves the requests of the core less time."""
    queue, memory = FileQueue(timeout_ms=ENDLESS), HostBuffer(BLOCK)
    hold = Hold(queue, read_at=0)
    ask_to_end()
    assert ending_seconds() == FIRST
    note_given_up(LIMIT)
    assert ending_seconds() == LATER
    failure = queue.wait(queue.read(file_of(tmp_path), offset=0, address=memory.address, nbytes=BLOCK))
    assert failure is not None and failure.message.endswith("did not return within 1 s")
    left = ending_seconds()
    assert left is not None and left < LATER
    hold.release()
    await_that(lambda: not queue.busy)


# ---- Ctrl-C while the core works ends the wait. The batch can then be continued or stopped


SEVERAL_TASKLETS = 40 * 1024
UNTOUCHED = -7.0


@contextmanager
def interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt, as Ctrl-C does, shortly after the body begins, and expect it to end the body."""
    # An alarm comes in time on a busy machine. A thread that sends SIGINT may not.
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def start_slow_update(state: StoredState, *, delay_us: int) -> tuple[Any, Any]:
    """Start an update of forty tasklets, one after the other, and return its gradient and parameters."""
    gradient, parameter = normals(9, SEVERAL_TASKLETS), np.full(SEVERAL_TASKLETS, UNTOUCHED, np.float32)
    inject(state.pipeline, seed=1, max_delay_us=delay_us)
    state.start(Operation.UPDATE, [Run(0, SEVERAL_TASKLETS, 0, gradient, parameter=parameter)], [STEP])
    return gradient, parameter


def test_an_interrupt_ends_the_wait_and_stop_the_batch(tmp_path: Path) -> None:
    """An interrupt ends the wait early. stop() skips tasklets that have not begun. The old place stays intact."""
    arrays = initial(SEVERAL_TASKLETS)
    with StoredState(tmp_path, SEVERAL_TASKLETS, 1024, options={"num_buffers": 1}) as state:
        state.pipeline.stop()  # which stops nothing
        state.write(*arrays)
        _, parameter = start_slow_update(state, delay_us=100_000)
        with interrupted():
            state.pipeline.wait()
        state.pipeline.stop()
        assert parameter[-1] == UNTOUCHED
        seen = parameter.copy()
        assert state.pipeline.finish() is None, "a stopped batch is over"
        state.pipeline.close()
        state.pipeline = state.open_pipeline()  # without delays
        assert_same(state.read(), arrays)
        np.testing.assert_array_equal(parameter, seen)


def test_an_interrupted_batch_goes_on(tmp_path: Path) -> None:
    """After an interrupted wait, the next wait returns when the batch is complete."""
    arrays = initial(SEVERAL_TASKLETS)
    with StoredState(tmp_path, SEVERAL_TASKLETS, 1024, options={"num_buffers": 1}) as state:
        state.write(*arrays)
        gradient, parameter = start_slow_update(state, delay_us=15_000)
        with interrupted():
            state.pipeline.finish()
        assert state.pipeline.finish() is None
        np.testing.assert_array_equal(parameter, adam(STEP, gradient, arrays)[0])
