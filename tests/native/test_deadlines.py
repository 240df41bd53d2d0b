"""Requests that a disk does not answer are given up in time, and keep the memory that they may still use."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.integrations import session
from lightning_smartinfinity.native import (
    Batch,
    Failure,
    FileQueue,
    HostBuffer,
    IoClass,
    IoScheduler,
    Operation,
    Pipeline,
    StateFile,
    TensorStore,
    ask_to_end,
    ending_seconds,
    io_engines,
    note_abandoned,
)
from lightning_smartinfinity.storage.io import scheduling
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.golden import adam_step
from tests.helpers.native_testing import EndingClock, Hold, inject
from tests.helpers.processes import REPOSITORY
from tests.helpers.waiting import LIMIT, PROCESS_LIMIT, await_that, lenient
from tests.native.stored import Run, StoredState, extent_bytes
from tests.native.test_pipeline import adam, assert_same, expected_update, initial, normals

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
    assert failure is not None and failure.kind == "timeout" and (failure.path, failure.offset) == (file.path, BLOCK)
    assert failure.message == (
        f"reading {BLOCK} bytes at offset {BLOCK} of {file.path} did not return within {seconds:g} s"
    )
    assert queue.busy
    refused = read(queue, file, HostBuffer(BLOCK), 2)
    assert refused is not None and refused.kind == "timeout"
    assert refused.message.endswith("was refused, since an earlier request has not returned")
    hold.release()
    await_that(lambda: not queue.busy)
    assert read(queue, file, memory, 3) is None and bytes(memory.memoryview()) == bytes([3]) * BLOCK


def test_a_batch_that_is_not_answered(tmp_path: Path) -> None:
    """The batch fails, none can follow before the write has returned, and what is read is as before."""
    arrays = initial(NUMEL)
    seconds = lenient()
    with StoredState(tmp_path, NUMEL, 1024, options={"timeout_ms": round(1000 * seconds)}) as state:
        state.write(*arrays)
        hold = Hold(state.pipeline, write_at=1)
        runs = [Run(0, NUMEL, 0, normals(9, NUMEL), parameter=np.zeros(NUMEL, np.float32))]
        state.start(Operation.UPDATE, runs, [STEP])
        failure = state.pipeline.finish()
        assert failure is not None and failure.kind == "timeout" and failure.message.startswith("writing ")
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
    note_abandoned(LIMIT)
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


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_interrupt_ends_the_wait(tmp_path: Path, goes_on: bool) -> None:
    """The next wait returns when the batch is complete.

    stop() skips tasklets that have not begun, and the old place stays intact.
    """
    arrays, gradient = initial(SEVERAL_TASKLETS), normals(9, SEVERAL_TASKLETS)
    parameter = np.full(SEVERAL_TASKLETS, UNTOUCHED, np.float32)
    with StoredState(tmp_path, SEVERAL_TASKLETS, 1024, options={"num_buffers": 1}) as state:
        state.pipeline.stop()  # which stops nothing
        state.write(*arrays)
        inject(state.pipeline, seed=1, max_delay_us=15_000 if goes_on else 100_000)
        state.start(Operation.UPDATE, [Run(0, SEVERAL_TASKLETS, 0, gradient, parameter=parameter)], [STEP])
        with interrupted():
            (state.pipeline.finish if goes_on else state.pipeline.wait)()
        if goes_on:
            assert state.pipeline.finish() is None
            np.testing.assert_array_equal(parameter, adam(STEP, gradient, arrays)[0])
            return
        state.pipeline.stop()
        assert parameter[-1] == UNTOUCHED
        seen = parameter.copy()
        assert state.pipeline.finish() is None, "a stopped batch is over"
        state.pipeline.close()
        state.pipeline = state.open_pipeline()  # without delays
        assert_same(state.read(), arrays)
        np.testing.assert_array_equal(parameter, seen)


# ---- pipelines and tensor stores take turns at the scheduler of their device


TASKLET = 1024
EXTENT = extent_bytes(TASKLET)


class Neighbour:
    """A tensor store on the same device, whose first write uses up all that may be in flight."""

    def __init__(self, folder: Path, scheduler: IoScheduler, *, timeout_ms: int | None = None) -> None:
        path = folder / "tensors"
        path.touch()
        self.store = TensorStore([StateFile(str(path), direct=False, scheduler=scheduler)], timeout_ms=timeout_ms)
        self._memory = HostBuffer(2 * EXTENT)

    def write(self, nbytes: int, io_class: IoClass = IoClass.AWAITED) -> int:
        extent = self.store.allocate(nbytes)
        return self.store.write(extent, offset=0, address=self._memory.address, nbytes=nbytes, io_class=io_class)


@contextmanager
def neighbours(
    folder: Path, *, num_tasklets: int = 2, timeout_ms: int | None = None
) -> Iterator[tuple[StoredState, Neighbour]]:
    """Make a state and a tensor store, of which two extents may be in flight together, and one while one is held."""
    scheduler = IoScheduler(in_flight_bytes=2 * EXTENT)
    state = StoredState(
        folder, num_tasklets * TASKLET, TASKLET, scheduler=scheduler, options={"timeout_ms": timeout_ms}
    )
    with state:
        state.write(*initial(state.numel))
        neighbour = Neighbour(folder, scheduler, timeout_ms=timeout_ms)
        yield state, neighbour
        neighbour.store.close()


def waits_of(state: StoredState) -> dict[tuple[str, str], tuple[int, int]]:
    return {(who, whom): (requests, nbytes) for who, whom, requests, nbytes, _ in state.scheduler.waits()}


@pytest.mark.parametrize(
    ("asks_by", "io_class"),
    [("nobody", IoClass.STATE), ("preferring", IoClass.BACKGROUND), ("waiting", IoClass.STATE)],
)
def test_what_somebody_needs_is_read_first(tmp_path: Path, asks_by: str, io_class: IoClass) -> None:
    """A read that waits for its turn overtakes others of its pipeline once its tasklet is needed."""
    with neighbours(tmp_path) as (state, neighbour):
        first, second = Hold(neighbour.store, write_at=0), Hold(neighbour.store, write_at=1)
        neighbour.write(EXTENT), neighbour.write(EXTENT)
        await_that(lambda: first.count + second.count == 2)
        found = tuple(np.zeros(state.numel, np.float32) for _ in range(3))
        tasklets = state.tasklets([Run(0, state.numel, arrays=found)])
        state.pipeline.submit(Batch(Operation.READ, tasklets, io_class=io_class))
        if asks_by == "preferring":
            state.pipeline.prefer([1])
        elif asks_by == "waiting":
            with interrupted():
                state.pipeline.wait_for([1])
        first.release()  # from now on one extent may be in flight
        assert state.pipeline.finish() is None
        second.release()
        name = io_class.name.lower()
        if asks_by == "nobody":
            assert waits_of(state) == {(name, "awaited"): (2, 2 * EXTENT), (name, name): (1, EXTENT)}
        else:
            assert waits_of(state) == {
                ("gather", "awaited"): (1, EXTENT),
                (name, "awaited"): (1, EXTENT),
                (name, "gather"): (1, EXTENT),
            }
        assert_same(found, initial(state.numel))


@pytest.mark.parametrize(("num_processes", "num_buffers", "widened"), [(1, 4, 4), (2, 8, 4)])
def test_a_ring_never_waits_for_itself(tmp_path: Path, num_processes: int, num_buffers: int, widened: int) -> None:
    """The bytes of a ring may be in flight together while its pipeline is open, however few are meant to be.

    A process of several has its part of the device's bytes, and of its ring's, and no more. Of a ring for several
    devices, each has its part.
    """
    scheduler = IoScheduler(in_flight_bytes=4096 * num_processes, num_processes=num_processes)
    assert scheduler.in_flight_bytes == 4096
    options = {"num_buffers": num_buffers}
    with StoredState(tmp_path, 16 * TASKLET, TASKLET, scheduler=scheduler, options=options) as state:
        assert scheduler.in_flight_bytes == widened * EXTENT
        state.write(*initial(state.numel))
        assert_same(state.read(), initial(state.numel))
        other = state.open_pipeline()
        state.pipeline.close()
        assert scheduler.in_flight_bytes == widened * EXTENT
        other.close()
        assert scheduler.in_flight_bytes == 4096
        assert num_processes > 1 or scheduler.waits() == []
        two = [IoScheduler(in_flight_bytes=4096) for _ in range(2)]
        files = [StateFile(str(state.paths[0]), direct=False, scheduler=each) for each in two]
        both = Pipeline(files=files, identity=state.identity, num_buffers=num_buffers, buffer_bytes=EXTENT)
        assert [each.in_flight_bytes for each in two] == 2 * [num_buffers // 2 * EXTENT]
        both.close()


@pytest.mark.parametrize("end", ["it is done", "it fails", "it is cancelled", "it is not answered"])
def test_requests_go_on_whatever_becomes_of_those_before(tmp_path: Path, end: str) -> None:
    """An update that waits for another user's request begins when that has ended in any way, with the same bits."""
    with neighbours(tmp_path, num_tasklets=5, timeout_ms=round(1000 * lenient())) as (state, neighbour):
        arrays = initial(state.numel)
        inject(state.pipeline, seed=1, max_delay_us=500, short_transfer_every=2)
        if end == "it fails":
            inject(neighbour.store, fail_write_at=0, errno=errno.EIO)
        hold = Hold(neighbour.store, write_at=0)
        begun = neighbour.write(2 * EXTENT)
        waiting = neighbour.write(2 * EXTENT)
        gradient, parameter = normals(9, state.numel), arrays[0].copy()
        runs = [Run(0, state.numel, 0, gradient, parameter=parameter)]
        state.start(Operation.UPDATE, runs, [adam_step()])
        if end == "it is cancelled":
            assert neighbour.store.cancel(waiting) and not neighbour.store.cancel(begun)
        if end != "it is not answered":
            hold.release()
        assert state.finish() is None
        failure = neighbour.store.wait(begun)
        assert (failure.kind if failure else None) == {"it fails": "io", "it is not answered": "timeout"}.get(end)
        hold.release()
        await_that(lambda: not neighbour.store.busy)
        arrays = expected_update(arrays, gradient, runs)
        assert_same((parameter,), arrays[:1])
        assert_same(state.read(), arrays)


def test_a_device_that_answers_nobody_is_given_up_by_all(tmp_path: Path) -> None:
    """Requests that are queued after others that do not return are given up soon after them, one by one."""
    scheduler = IoScheduler(in_flight_bytes=2 * EXTENT)
    with ExitStack() as opened:
        states, holds = [], []
        for number in range(5):
            folder = tmp_path / str(number)
            folder.mkdir()
            options = {"timeout_ms": ENDLESS}
            states.append(StoredState(folder, 2 * TASKLET, TASKLET, scheduler=scheduler, options=options))
            opened.enter_context(states[-1])
            states[-1].write(*initial(states[-1].numel))
        for state in states:
            holds.append(Hold(state.pipeline, read_at=0, count=2))
            state.start(Operation.READ, [Run(0, state.numel)])
        # Three seconds for each of them would be more than those for which limits are short.
        ask_to_end()
        failures = [state.pipeline.finish() for state in states]
        assert [failure and failure.kind for failure in failures] == ["timeout"] * len(states)
        for hold in holds:
            hold.release()
        await_that(lambda: not any(state.pipeline.busy for state in states))


@pytest.mark.parametrize("num_processes", [1, 4])
def test_the_ranks_of_a_machine_share_a_device(
    tmp_path: Path, num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an equal part of what one process alone may have in flight."""
    monkeypatch.setattr(scheduling, "_schedulers", {})
    monkeypatch.setattr(scheduling, "_num_processes", 1)
    monkeypatch.setattr(session, "prepare_environment", lambda device_type, *, local_world_size: None)
    strategy = SmartInfinityStrategy(tmp_path / "storage")
    strategy._prepare_environment(torch.device("cpu"), local_world_size=num_processes)
    with (tmp_path / "file").open("w") as file:
        part = scheduling.scheduler_of(file.fileno()).in_flight_bytes
    assert part * num_processes == IoScheduler().in_flight_bytes
