"""Makes the card of a small partition fail, lets the host do the rest, and checks whether the card works again."""

from __future__ import annotations

import numpy as np

from lightning_smartinfinity.native import Failure, Operation
from tests.helpers.golden import STEPS, random_arrays
from tests.helpers.waiting import await_that
from tests.native.stored import Array, Run
from tests.xrt.card_state import CardState

__all__ = [
    "ARRAYS",
    "GRADIENT",
    "NUMEL",
    "STEP",
    "TASKLET",
    "fail",
    "make_good",
    "runs_of",
    "succeed",
    "wait_until_returned",
]

STEP = STEPS["adamw"]
NUMEL, TASKLET = 4 * 1_000 + 5, 1_000
GRADIENT, *ARRAYS = random_arrays(STEP, NUMEL, 11, special=False)


def runs_of(parameter: Array) -> list[Run]:
    """Return one run over the whole partition, into these parameters."""
    return [Run(0, NUMEL, 0, GRADIENT, parameter=parameter)]


def fail(state: CardState, kind: str = "device") -> tuple[Failure, Array]:
    """Run a batch that must fail in this way; return the failure and the parameters so far."""
    parameter = np.zeros(NUMEL, np.float32)
    failure = state.update(runs_of(parameter), [STEP])
    assert failure is not None and failure.kind == kind
    return failure, parameter


def make_good(state: CardState, parameter: Array) -> None:
    """Let the host do the rest, and assert that everything is as if the card had done it."""
    state.redo(runs_of(parameter), [STEP])
    _assert_like_host(state, parameter)


def succeed(state: CardState) -> None:
    """Run a batch that must not fail."""
    parameter = np.zeros(NUMEL, np.float32)
    assert state.update(runs_of(parameter), [STEP]) is None
    _assert_like_host(state, parameter)


def wait_until_returned(state: CardState) -> None:
    """Wait until everything that was given up has returned."""
    await_that(lambda: not state.pipeline.busy)


def _assert_like_host(state: CardState, parameter: Array) -> None:
    expected = np.zeros(NUMEL, np.float32)
    assert state.host.work(Operation.UPDATE, runs_of(expected), [STEP]) is None
    np.testing.assert_array_equal(parameter, expected)
    state.assert_same()
