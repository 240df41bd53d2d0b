"""Faults of a card are noticed and reported, and the host redoes the work from the place that is untouched."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Card, CardError
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.helpers.runif import RunIf
from tests.helpers.waiting import join, lenient
from tests.xrt.card_state import BINDINGS, CardCase, card_state
from tests.xrt.cards import EmulatedCards
from tests.xrt.python_binding import ApiBinding
from tests.xrt.recovery import ARRAYS, NUMEL, STEP, TASKLET, fail, make_good, runs_of, succeed, wait_until_returned

pytestmark = RunIf(xrt=True)

STATUS, PARAMETER, MASTER_OUT = 8, 7, 4  # pointers of adamw_update, in the order of its arguments


KINDS: dict[str, tuple[Callable[[EmulatedCards, int], None], str]] = {
    "error": (lambda cards, skipped: cards.inject("error", skipped=skipped), r"ended with ERROR \(5\)"),
    "abort": (lambda cards, skipped: cards.inject("abort", skipped=skipped), r"ended with ABORT \(6\)"),
    "status": (
        lambda cards, skipped: cards.inject("corrupt", skipped=skipped, pointer=STATUS, bit=1),
        "there is no status of a kernel",
    ),
    "count": (
        lambda cards, skipped: cards.inject("corrupt", skipped=skipped, pointer=STATUS, bit=2 * 32),
        r"the kernel updated \d+ elements, expected \d+",
    ),
    "parameter": (
        lambda cards, skipped: cards.inject("corrupt", skipped=skipped, pointer=PARAMETER, bit=77),
        "the parameters arrived with another checksum than the kernel wrote them with",
    ),
    "submit": (lambda cards, skipped: cards.inject("submit", skipped=skipped), "xrtRunStart failed"),
    "sync": (
        lambda cards, skipped: cards.inject("sync", skipped=skipped),
        r"xrtBOSync of \d+ bytes (to|from) the card failed",
    ),
}


@pytest.mark.parametrize("num_failures", long_but([20], [20, 100]))
@pytest.mark.parametrize("kind", KINDS)
def test_failed_runs_and_calls(tmp_path: Path, emulated_cards: EmulatedCards, kind: str, num_failures: int) -> None:
    """Every failed run or call is reported and made good by the host, and the card works again afterwards."""
    start, message = KINDS[kind]
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        for number in range(num_failures):
            start(emulated_cards, number % 5)
            failure, parameter = fail(state)
            assert failure.tasklet in range(5)
            where = f"the card did not update tasklet {failure.tasklet} of {state.stored.paths[0]}: "
            assert re.fullmatch(re.escape(where) + f".*{message}.*", failure.message)
            assert not state.pipeline.busy
            make_good(state, parameter)
        succeed(state)


def test_runs_that_do_not_return(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A run is given up at its deadline; the card takes no work until the run returns, and works again afterwards."""
    case = CardCase(tasklet_numel=TASKLET, timeout_ms=round(1000 * lenient()))
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        for number in range(5):
            emulated_cards.inject("hang", skipped=number % 5)
            failure, parameter = fail(state)
            assert f"did not return within {case.timeout_ms} ms" in failure.message
            assert state.pipeline.busy
            with pytest.raises(ValueError, match="what was abandoned, as it did not return in time, has not returned"):
                state.submit(runs_of(parameter), [STEP])
            make_good(state, parameter)
            emulated_cards.release()
            wait_until_returned(state)
            state.assert_same()  # what came late changed nothing


@pytest.mark.parametrize("num_done", [0, 3])
def test_what_is_done_stays(tmp_path: Path, emulated_cards: EmulatedCards, num_done: int) -> None:
    with card_state(
        tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET, num_buffers=1, compute_threads=1)
    ) as state:
        state.write(*ARRAYS)
        assert state.pipeline.finished() == []
        emulated_cards.inject("error", skipped=num_done)
        failure, parameter = fail(state)
        assert failure.tasklet == num_done
        assert state.pipeline.finished() == list(range(num_done))
        make_good(state, parameter)


def test_a_lost_card(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Calls of a lost card fail; nothing hangs, not even closing."""
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        emulated_cards.inject("lost", skipped=1)
        failure, parameter = fail(state)
        make_good(state, parameter)
        failure, parameter = fail(state)
        assert "failed" in failure.message
        make_good(state, parameter)


def test_closing_with_a_run_that_does_not_return(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Closing does not hang; the run's memory is given up for lost, because the run may still write it."""
    emulated_cards.reset(count=3)
    lost = 2  # it takes no other xclbin from now on; other tests use the first two
    before = emulated_cards.counter("num_buffers", lost)
    case = CardCase(tasklet_numel=TASKLET, card=lost, timeout_ms=round(1000 * lenient()))
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        during = emulated_cards.counter("num_buffers", lost)
        state.write(*ARRAYS)
        emulated_cards.inject("hang", card=lost)
        fail(state)
    assert before < during <= emulated_cards.counter("num_buffers", lost)
    emulated_cards.release()
    emulated_cards.wait_for("run-end")
    with card_state(
        tmp_path / "again", emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET, card=lost)
    ) as state:
        state.write(*ARRAYS)
        succeed(state)


def test_closing_frees_everything(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    before = emulated_cards.counter("num_buffers"), emulated_cards.counter("card_bytes")
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        succeed(state)
        assert emulated_cards.counter("num_buffers") > before[0]
    assert (emulated_cards.counter("num_buffers"), emulated_cards.counter("card_bytes")) == before


def test_stopping_waits_for_what_runs(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        emulated_cards.inject("hang", skipped=1)
        parameter = np.zeros(NUMEL, np.float32)
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
        state.submit(runs_of(np.zeros(NUMEL, np.float32)), [STEP])
        emulated_cards.wait_for("run-hung")
        state.pipeline.stop()
        assert state.pipeline.busy
        emulated_cards.release()
        wait_until_returned(state)


@pytest.mark.parametrize("array", range(3))
def test_storage_that_returns_other_bytes(tmp_path: Path, emulated_cards: EmulatedCards, array: int) -> None:
    """If the kernel's checksum of what it read is not the stored one, no parameter is returned."""
    parameter = np.zeros(NUMEL, np.float32)
    with card_state(tmp_path, emulated_cards, STEP, NUMEL) as state:
        state.write(*ARRAYS)
        offset = state.stored.extent_offset(0, state.stored.place) + array * state.stored.extent_bytes // 3
        with state.stored.paths[0].open("r+b") as file:
            file.seek(offset // 4096 * 4096)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        failure = state.update(runs_of(parameter), [STEP])
        assert failure is not None and failure.kind == "device"
        assert f"array {array} arrived with another checksum than it was written with" in failure.message
        assert not parameter.any() and state.pipeline.finished() == []


def test_another_generation(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The trailer is checked before anything runs, as on the host."""
    with card_state(tmp_path, emulated_cards, STEP, NUMEL) as state:
        state.write(*ARRAYS)
        state.stored.generation += 1
        failure, _ = fail(state, "generation")
        assert "generation is 1, expected 2" in failure.message
    assert emulated_cards.counter("runs_begun") == 0


@pytest.mark.parametrize("fault", [{"fail_read_at": 3}, {"fail_write_at": 1}, {"fail_write_at": 2}])
@pytest.mark.parametrize("seed", range(3))
def test_failed_reads_and_writes(
    tmp_path: Path, emulated_cards: EmulatedCards, seed: int, fault: dict[str, int]
) -> None:
    """A failed transfer of an extent's regions or of the page with its trailer is made good by the host."""
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        inject(state.pipeline, seed=seed, max_delay_us=500, short_transfer_every=3, **fault)
        failure, parameter = fail(state, "io")
        assert failure.errno == 5
        make_good(state, parameter)
        succeed(state)


def test_a_gradient_file_that_cannot_be_written(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    with card_state(
        tmp_path, emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET, gradient_path=Path("/dev/full"))
    ) as state:
        state.write(*ARRAYS)
        failure, parameter = fail(state)
        assert failure.errno == errno.ENOSPC
        assert "writing the gradient in /dev/full failed: No space left on device" in failure.message
        make_good(state, parameter)


def test_too_little_memory(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A ring larger than its allowance or than the card's memory is refused, and nothing stays allocated."""
    before = emulated_cards.counter("num_buffers")
    needed = 3 * (3 * 16384 + 16384 + 16384 + 4096)
    message = rf"the card's DRAM is too small: a ring of 3 buffers takes {needed} bytes, {needed - 1} are allowed"
    with (
        pytest.raises(CardError, match=message),
        card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(dram_bytes=needed - 1)),
    ):
        pass
    emulated_cards.inject("alloc", skipped=5)
    message = rf"a ring of 3 buffers takes {needed} bytes of the card's DRAM, buffer 1 is unavailable: xrtBOAlloc of"
    with pytest.raises(CardError, match=message), card_state(tmp_path / "2", emulated_cards, STEP, NUMEL):
        pass
    emulated_cards.set("p2p", 0)
    with (
        pytest.raises(CardError, match=r"xrtBOAlloc of \d+ bytes, peer to peer, failed"),
        card_state(tmp_path / "3", emulated_cards, STEP, NUMEL),
    ):
        pass
    assert emulated_cards.counter("num_buffers") == before
    emulated_cards.set("p2p", 1)
    with card_state(tmp_path / "4", emulated_cards, STEP, NUMEL, CardCase(dram_bytes=needed)) as state:
        state.write(*ARRAYS)
        succeed(state)


class FailingBinding(ApiBinding):
    """A binding that raises in one method."""

    method = ""

    def __getattribute__(self, name: str) -> object:
        if name == object.__getattribute__(self, "method"):
            return lambda *arguments: 1 / 0
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("method", ["set_scalar", "set_buffer", "start", "wait", "state", "sync", "part"])
def test_a_binding_that_raises(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An exception that Python raises in a thread of the pipeline counts as a failed call."""
    binding = FailingBinding(0, emulated_cards.build.xclbin)
    monkeypatch.setitem(BINDINGS, "failing", lambda cards, index: Card(binding))
    # Only the case with a hung run needs a short deadline; other calls may be slow on a machine under load.
    timeout_ms = round(1000 * lenient()) if method == "state" else 60_000
    with card_state(
        tmp_path,
        emulated_cards,
        STEP,
        NUMEL,
        CardCase(tasklet_numel=TASKLET, binding="failing", timeout_ms=timeout_ms),
    ) as state:
        state.write(*ARRAYS)
        if method == "state":
            emulated_cards.inject("hang")
        binding.method = method
        failure, parameter = fail(state)
        assert f"{method} failed: division by zero" in failure.message
        binding.method = ""
        emulated_cards.release()
        wait_until_returned(state)
        make_good(state, parameter)
        succeed(state)
