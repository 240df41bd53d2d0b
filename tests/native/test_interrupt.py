"""Ctrl-C while the core works ends the wait. The batch can then be continued or stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.native import FileQueue, HostBuffer, Operation, Pipeline, StateFile
from tests.helpers.native_testing import inject
from tests.helpers.update_rules import adam_step
from tests.native.stored import Run, StoredState
from tests.native.test_pipeline import adam, assert_same, initial, normals

NUMEL = 40 * 1024
STEP = adam_step()
UNTOUCHED = -7.0


__all__ = ["interrupted"]


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
    gradient, parameter = normals(9, NUMEL), np.full(NUMEL, UNTOUCHED, np.float32)
    inject(state.pipeline, seed=1, max_delay_us=delay_us)
    state.start(Operation.UPDATE, [Run(0, NUMEL, 0, gradient, parameter=parameter)], [STEP])
    return gradient, parameter


WAITS: list[Callable[[Pipeline], object]] = [Pipeline.wait, Pipeline.finish]


@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_ends_the_wait_and_stop_the_batch(wait: Callable[[Pipeline], object], tmp_path: Path) -> None:
    """An interrupt ends the wait early. stop() skips tasklets that have not begun. The old place stays intact."""
    arrays = initial(NUMEL)
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 1}) as state:
        state.pipeline.stop()  # which stops nothing
        state.write(*arrays)
        _, parameter = start_slow_update(state, delay_us=100_000)
        with interrupted():
            wait(state.pipeline)
        state.pipeline.stop()
        assert parameter[-1] == UNTOUCHED
        seen = parameter.copy()
        assert state.pipeline.finish() is None, "a stopped batch is over"
        inject(state.pipeline)
        assert_same(state.read(), arrays)
        np.testing.assert_array_equal(parameter, seen)


def test_an_interrupted_batch_goes_on(tmp_path: Path) -> None:
    """After an interrupted wait, the next wait returns when the batch is complete."""
    arrays = initial(NUMEL)
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 1}) as state:
        state.write(*arrays)
        gradient, parameter = start_slow_update(state, delay_us=15_000)
        with interrupted():
            state.pipeline.finish()
        assert state.pipeline.finish() is None
        np.testing.assert_array_equal(parameter, adam(STEP, gradient, arrays)[0])


def test_an_interrupted_request_goes_on(tmp_path: Path) -> None:
    """An interrupt ends the wait for a request early, and a later wait returns its result."""
    written = np.random.default_rng(0).integers(1, 256, (40, 4096), np.uint8)
    (tmp_path / "file").write_bytes(written.tobytes())
    file = StateFile(str(tmp_path / "file"), direct=False)
    # A thread reads one after the other. io_uring would finish all reads while the first completion is delayed.
    queue, memory = FileQueue(io_threads=1, io_engine="threads"), HostBuffer(written.nbytes)
    read = np.frombuffer(memory.memoryview(), np.uint8).reshape(written.shape)
    inject(queue, seed=1, max_delay_us=25_000)
    tickets = [
        queue.read(file, offset=i * 4096, address=memory.address + i * 4096, nbytes=4096) for i in range(len(read))
    ]
    with interrupted():
        queue.wait(tickets[-1])
    assert not read[-1].any(), "it was not waited for"
    assert [queue.wait(ticket) for ticket in tickets] == [None] * len(tickets)
    np.testing.assert_array_equal(read, written)
