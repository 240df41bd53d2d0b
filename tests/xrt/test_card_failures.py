"""Faults of a card are noticed and reported, and the host redoes the work from the place that is untouched."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.runif import RunIf
from tests.helpers.waiting import join, lenient
from tests.xrt.card_state import CardCase, bound, card_state
from tests.xrt.cards import EmulatedCards
from tests.xrt.recovery import ARRAYS, NUMEL, STEP, TASKLET, fail, make_good, runs_of, succeed, wait_until_returned

pytestmark = RunIf(xrt=True)

STATUS, PARAMETER = 8, 7  # pointers of adamw_update, in the order of its arguments

# Kind of fault, where it is, and what is told.
KINDS = {
    "error": ("error", {}, r"ended with ERROR \(5\)"),
    "abort": ("abort", {}, r"ended with ABORT \(6\)"),
    "status": ("corrupt", {"pointer": STATUS, "bit": 1}, "there is no status of a kernel"),
    "count": ("corrupt", {"pointer": STATUS, "bit": 2 * 32}, r"the kernel updated \d+ elements, expected \d+"),
    "parameter": (
        "corrupt",
        {"pointer": PARAMETER, "bit": 77},
        "the parameters arrived with another checksum than the kernel wrote them with",
    ),
    "submit": ("submit", {}, "xrtRunStart failed"),
    "sync": ("sync", {}, r"xrtBOSync of \d+ bytes (to|from) the card failed"),
    "lost": ("lost", {}, r"failed|ended with ABORT \(6\)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_failed_runs_and_calls(tmp_path: Path, emulated_cards: EmulatedCards, kind: str) -> None:
    """Every failed run or call is reported and made good by the host, and the card works again afterwards.

    Nothing hangs on a lost card, not even closing.
    """
    fault, where, message = KINDS[kind]
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        for number in range(5):
            emulated_cards.inject(fault, skipped=number, **where)
            failure, parameter = fail(state)
            told = f"the card did not update tasklet {failure.tasklet} of {state.stored.paths[0]}: "
            assert failure.tasklet in range(5)
            assert re.fullmatch(re.escape(told) + f".*({message}).*", failure.message)
            assert not state.pipeline.busy
            make_good(state, parameter)
            if kind == "lost":
                return
        succeed(state)


def test_what_is_done_stays(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The tasklets before the one that failed count as finished."""
    case = CardCase(tasklet_numel=TASKLET, num_buffers=1, compute_threads=1)
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        emulated_cards.inject("error", skipped=3)
        failure, parameter = fail(state)
        assert failure.tasklet == 3 and state.pipeline.finished() == [0, 1, 2]
        make_good(state, parameter)


def test_stopping_waits_for_what_runs(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Stopping returns when the run that hangs has ended."""
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        emulated_cards.inject("hang", skipped=1)
        parameter = np.zeros(NUMEL, np.float32)  # the card may write it until the end
        state.submit(runs_of(parameter), [STEP])
        emulated_cards.wait_for("run-hung")
        completed: list[int] = []

        def stop() -> None:
            state.pipeline.stop()
            completed.append(emulated_cards.counter("runs_completed"))

        stopping = threading.Thread(target=stop)
        stopping.start()
        before = emulated_cards.counter("runs_completed")
        assert not completed
        emulated_cards.release()
        join(stopping)
        assert completed[0] > before and not state.pipeline.busy
        succeed(state)


def test_stopping_with_an_abandoned_run(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Stopping does not wait for a hung run. With one run at a time no other is given up on a busy machine."""
    case = CardCase(tasklet_numel=TASKLET, num_buffers=1, compute_threads=1, timeout_ms=round(1000 * lenient()))
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        emulated_cards.inject("hang")
        parameter = np.zeros(NUMEL, np.float32)  # the card may write it until the end
        state.submit(runs_of(parameter), [STEP])
        emulated_cards.wait_for("run-hung")
        state.pipeline.stop()
        assert state.pipeline.busy
        emulated_cards.release()
        wait_until_returned(state)


def test_another_generation(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The trailer is checked before anything runs, as on the host."""
    with card_state(tmp_path, emulated_cards, STEP, NUMEL) as state:
        state.write(*ARRAYS)
        state.stored.generation += 1
        failure, _ = fail(state, "generation")
        assert "generation is 1, expected 2" in failure.message
    assert emulated_cards.counter("runs_begun") == 0


def test_a_gradient_file_that_cannot_be_written(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The failure has the file and the reason, and the host goes on."""
    case = CardCase(tasklet_numel=TASKLET, gradient_path=Path("/dev/full"))
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        failure, parameter = fail(state)
        assert failure.errno == errno.ENOSPC
        assert "writing the gradient in /dev/full failed: No space left on device" in failure.message
        make_good(state, parameter)


@pytest.mark.parametrize("method", ["set_scalar", "set_buffer", "start", "wait", "state", "sync", "part"])
@pytest.mark.usefixtures("pyxrt")
def test_a_binding_that_raises(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An exception that Python raises in a thread of the pipeline counts as a failed call."""
    binding = bound(emulated_cards)
    # Only the case with a hung run needs a short deadline; other calls may be slow on a machine under load.
    timeout_ms = round(1000 * lenient()) if method == "state" else 60_000
    case = CardCase(tasklet_numel=TASKLET, binding=binding, timeout_ms=timeout_ms)
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        with monkeypatch.context() as patched:
            if method == "state":
                patched.setattr(binding, "wait", lambda *_: 3)  # still running
            patched.setattr(binding, method, lambda *_: 1 / 0)
            failure, parameter = fail(state)
        assert f"{method} failed: division by zero" in failure.message
        wait_until_returned(state)
        make_good(state, parameter)
        succeed(state)
