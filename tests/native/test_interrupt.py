"""Ctrl-C while the core works ends the wait. The batch can then be continued or stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.native import Operation
from tests.helpers.golden import adam_step
from tests.helpers.native_testing import inject
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


def test_an_interrupt_ends_the_wait_and_stop_the_batch(tmp_path: Path) -> None:
    """An interrupt ends the wait early. stop() skips tasklets that have not begun. The old place stays intact."""
    arrays = initial(NUMEL)
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 1}) as state:
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
    arrays = initial(NUMEL)
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 1}) as state:
        state.write(*arrays)
        gradient, parameter = start_slow_update(state, delay_us=15_000)
        with interrupted():
            state.pipeline.finish()
        assert state.pipeline.finish() is None
        np.testing.assert_array_equal(parameter, adam(STEP, gradient, arrays)[0])
