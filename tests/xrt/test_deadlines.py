"""A card's reads, writes and syncs that do not return are given up, and keep the memory that they still use."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.native import Card
from tests.helpers.native_testing import Hold
from tests.helpers.runif import RunIf
from tests.helpers.waiting import LIMIT, lenient
from tests.xrt.card_state import BINDINGS, CardCase, CardState, card_state
from tests.xrt.cards import EmulatedCards
from tests.xrt.python_binding import ApiBinding
from tests.xrt.recovery import ARRAYS, NUMEL, STEP, TASKLET, fail, make_good, runs_of, succeed, wait_until_returned

pytestmark = RunIf(xrt=True)


def impatient(**settings: Any) -> CardCase:
    """Return the settings of a card whose requests are given up early."""
    return CardCase(tasklet_numel=TASKLET, timeout_ms=round(1000 * lenient()), **settings)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_late_read(tmp_path: Path, emulated_cards: EmulatedCards, number: int) -> None:
    """After a late read the host does the rest at once, and the card takes no work before the read returns."""
    case = impatient()
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        hold = Hold(state.pipeline, read_at=number)
        failure, parameter = fail(state)
        where = rf"reading \d+ bytes at offset \d+ of {re.escape(str(state.stored.paths[0]))}"
        told = rf"{where} \(tasklet {failure.tasklet}\) did not return within {case.timeout_ms} ms"
        assert re.fullmatch(told, failure.message)
        assert hold.count == 1 and state.pipeline.busy and state.pipeline.writes_out() == []
        with pytest.raises(ValueError, match="what was abandoned, as it did not return in time, has not returned"):
            state.submit(runs_of(parameter), [STEP])
        make_good(state, parameter)
        hold.release()
        wait_until_returned(state)
        state.assert_same()  # what came late changed nothing
        succeed(state)


@pytest.mark.parametrize("number", [0, 1])
def test_late_write(tmp_path: Path, emulated_cards: EmulatedCards, number: int) -> None:
    """The pipeline tells where a late write may still write, and its tasklet is not done."""
    case = impatient()
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        hold = Hold(state.pipeline, write_at=number)
        failure, parameter = fail(state)
        told = re.fullmatch(
            r"writing (\d+) bytes at offset (\d+) of .* \(tasklet (\d)\) did not return within "
            rf"{case.timeout_ms} ms",
            failure.message,
        )
        assert told is not None
        nbytes, offset, tasklet = map(int, told.groups())
        assert state.pipeline.busy and state.pipeline.writes_out() == [(offset, nbytes)]
        begin = state.stored.extent_offset(tasklet, 1 - state.stored.place)
        assert begin <= offset and offset + nbytes <= begin + state.stored.extent_bytes_of(tasklet)
        assert tasklet not in state.pipeline.finished()
        hold.release()
        wait_until_returned(state)
        assert state.pipeline.writes_out() == []
        make_good(state, parameter)
        succeed(state)


def test_several_late_writes(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The batch ends when all late writes have been given up; the card works again when the last has returned."""
    case = impatient()
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        hold = Hold(state.pipeline, write_at=0, count=100)
        _, parameter = fail(state)
        assert len(state.pipeline.writes_out()) == hold.count >= 2
        hold.release()
        wait_until_returned(state)
        make_good(state, parameter)
        succeed(state)


@pytest.mark.parametrize("number", range(5))
def test_late_sync(tmp_path: Path, emulated_cards: EmulatedCards, number: int) -> None:
    """A late sync of a gradient, a status or parameters is treated like a late read."""
    case = impatient()
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        emulated_cards.inject("stall", skipped=number)
        failure, parameter = fail(state)
        told = r"the card did not update tasklet \d of .*: a sync of \d+ bytes (to|from) the card did not return within"
        assert re.fullmatch(told + f" {case.timeout_ms} ms", failure.message)
        assert state.pipeline.busy
        make_good(state, parameter)
        emulated_cards.release()
        wait_until_returned(state)
        state.assert_same()
        succeed(state)


@pytest.mark.parametrize(("kind", "verb"), [("read_at", "reading"), ("write_at", "writing")])
@pytest.mark.parametrize("number", [0, 2])
def test_late_gradient(tmp_path: Path, emulated_cards: EmulatedCards, kind: str, verb: str, number: int) -> None:
    """A gradient that is late on its way through a file is treated like a late read: no place of state is at risk."""
    case = impatient(through_file=True)
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        hold = Hold(state.pipeline, gradients=True, **{kind: number})
        failure, parameter = fail(state)
        told = f"{verb} the gradient in {tmp_path / 'gradients-0'} did not return within {case.timeout_ms} ms"
        assert told in failure.message
        assert hold.count == 1 and state.pipeline.busy and state.pipeline.writes_out() == []
        make_good(state, parameter)
        hold.release()
        wait_until_returned(state)
        state.assert_same()
        succeed(state)


class SlowStart(ApiBinding):
    """A binding that holds the start of a run until ``started`` is set."""

    def __init__(self, index: int, xclbin: Path) -> None:
        super().__init__(index, xclbin)
        self.started = threading.Event()
        self.started.set()

    def start(self, run: Any) -> None:
        self.started.wait(LIMIT)
        super().start(run)


def test_late_start(tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that may still begin keeps its memory until it has ended."""
    binding = SlowStart(0, emulated_cards.build.xclbin)
    monkeypatch.setitem(BINDINGS, "slow", lambda cards, index: Card(binding))
    case = impatient(binding="slow", compute_threads=1)
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        state.write(*ARRAYS)
        binding.started.clear()
        failure, parameter = fail(state)
        told = f"the start of a run of kernel adamw_update did not return within {case.timeout_ms} ms"
        assert told in failure.message
        assert state.pipeline.busy
        make_good(state, parameter)
        emulated_cards.inject("hang")
        binding.started.set()
        emulated_cards.wait_for("run-hung")
        assert state.pipeline.busy
        emulated_cards.release()
        wait_until_returned(state)
        state.assert_same()
        succeed(state)


def stall(state: CardState, cards: EmulatedCards, card: int) -> Callable[[], None]:
    cards.inject("stall", card=card)
    return cards.release


LATE: dict[str, Callable[[CardState, EmulatedCards, int], Callable[[], None]]] = {
    "read": lambda state, cards, card: Hold(state.pipeline, read_at=1).release,
    "write": lambda state, cards, card: Hold(state.pipeline, write_at=1).release,
    "sync": stall,
}


@pytest.mark.parametrize("kind", LATE)
def test_closing_with_something_out(tmp_path: Path, emulated_cards: EmulatedCards, kind: str) -> None:
    """Closing does not hang; memory that a late request may use is given up for lost, and late data harm nothing."""
    emulated_cards.reset(count=6)
    lost = 3 + list(LATE).index(kind)  # the memory of this card stays taken
    before = emulated_cards.counter("num_buffers", lost)
    case = impatient(card=lost)
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, case) as state:
        during = emulated_cards.counter("num_buffers", lost)
        state.write(*ARRAYS)
        release = LATE[kind](state, emulated_cards, lost)
        fail(state)
    assert before < during <= emulated_cards.counter("num_buffers", lost)
    release()
    with card_state(tmp_path / "again", emulated_cards, STEP, NUMEL, CardCase(tasklet_numel=TASKLET)) as state:
        state.write(*ARRAYS)
        succeed(state)
