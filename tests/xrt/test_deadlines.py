"""A card's runs, reads, writes and syncs that do not return are given up, and keep the memory that they still use."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import Hold
from tests.helpers.runif import RunIf
from tests.helpers.waiting import LIMIT, lenient
from tests.xrt.card_state import (
    STEP,
    CardState,
    bound,
    fail,
    make_good,
    runs_of,
    small_state,
    succeed,
    wait_until_returned,
)
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

READING = r"reading \d+ bytes at offset \d+ of {path} \(tasklet \d\)"
SYNC = r"the card did not update tasklet \d of .*: a sync of \d+ bytes (to|from) the card"
RUN = r"the card did not update tasklet \d of .*"
LATE: dict[str, tuple[dict[str, Any] | str, int, str]] = {
    "read": ({"read_at": 0}, 0, READING),
    "read of a trailer": ({"read_at": 1}, 0, READING),
    "last read": ({"read_at": 5}, 0, READING),
    "gradient to its file": ({"write_at": 2, "gradients": True}, 0, RUN + r"writing the gradient in .*/gradients-0"),
    "gradient from its file": ({"read_at": 0, "gradients": True}, 0, RUN + r"reading the gradient in .*/gradients-0"),
    "first sync": ("stall", 0, SYNC),
    "third sync": ("stall", 2, SYNC),
    "fifth sync": ("stall", 4, SYNC),
    "run": ("hang", 0, RUN),
    "third run": ("hang", 2, RUN),
}
"""What is held or injected, how many pass before it, and what is told."""
USUAL = [kind for kind in LATE if "third" not in kind and "trailer" not in kind]


@pytest.fixture
def timeout_ms() -> int:
    """Milliseconds after which a card's requests are given up."""
    return round(1000 * lenient())


def begin(kind: str, state: CardState, cards: EmulatedCards, card: int = 0) -> Callable[[], None]:
    """Prepare something late, and return the function that lets it go on."""
    what, skipped, _ = LATE[kind]
    if isinstance(what, str):
        cards.inject(what, card=card, skipped=skipped)
        return cards.release
    return Hold(state.pipeline, **what).release


@pytest.mark.parametrize("kind", long_but(USUAL, LATE))
def test_late(tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, kind: str) -> None:
    """The host does the rest at once, and the card takes no work before what was given up returns."""
    by_file = "gradient" in kind
    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms, through_file=by_file) as state:
        release = begin(kind, state, emulated_cards)
        failure, parameter = fail(state)
        told = LATE[kind][2].replace("{path}", re.escape(str(state.stored.paths[0])))
        assert re.fullmatch(f"{told}.* did not return within {timeout_ms} ms", failure.message)
        assert state.pipeline.busy and state.pipeline.writes_out() == []
        with pytest.raises(ValueError, match="what was abandoned, as it did not return in time, has not returned"):
            state.submit(runs_of(parameter), [STEP])
        make_good(state, parameter)
        release()
        wait_until_returned(state)
        state.assert_same()  # what came late changed nothing
        succeed(state)


@pytest.mark.parametrize(("number", "count"), [(0, 1), (1, 1), (0, 100)])
def test_late_writes(tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, number: int, count: int) -> None:
    """The pipeline tells where late writes may still write, and their tasklets are not done."""
    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms) as state:
        hold = Hold(state.pipeline, write_at=number, count=count)
        failure, parameter = fail(state)
        told = re.fullmatch(
            rf"writing (\d+) bytes at offset (\d+) of .* \(tasklet (\d)\) did not return within {timeout_ms} ms",
            failure.message,
        )
        assert told is not None and state.pipeline.busy
        nbytes, offset, tasklet = map(int, told.groups())
        assert (offset, nbytes) in state.pipeline.writes_out()
        assert len(state.pipeline.writes_out()) == hold.count and (hold.count == 1) == (count == 1)
        start = state.stored.extent_offset(tasklet, 1 - state.stored.place)
        assert start <= offset and offset + nbytes <= start + state.stored.extent_bytes_of(tasklet)
        assert tasklet not in state.pipeline.finished()
        hold.release()
        wait_until_returned(state)
        assert state.pipeline.writes_out() == []
        make_good(state, parameter)
        succeed(state)


@pytest.mark.usefixtures("pyxrt")
def test_late_start(
    tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that may still begin keeps its memory until it has ended."""
    binding, started = bound(emulated_cards), threading.Event()
    start = binding.start

    def late(run: Any) -> None:
        started.wait(LIMIT)
        start(run)

    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms, binding=binding, compute_threads=1) as state:
        monkeypatch.setattr(binding, "start", late)
        failure, parameter = fail(state)
        told = f"the start of a run of kernel adamw_update did not return within {timeout_ms} ms"
        assert told in failure.message and state.pipeline.busy
        make_good(state, parameter)
        emulated_cards.inject("hang")
        started.set()
        emulated_cards.wait_for("run-hung")
        assert state.pipeline.busy
        emulated_cards.release()
        wait_until_returned(state)
        state.assert_same()
        succeed(state)


@pytest.mark.parametrize(("kind", "lost"), [("run", 2), ("read of a trailer", 3), ("first sync", 4)])
def test_closing_with_something_out(
    tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, kind: str, lost: int
) -> None:
    """Closing does not hang; memory that a late request may use is given up for lost, and late data harm nothing.

    The memory of the card stays taken.
    """
    emulated_cards.reset(count=5)
    before = emulated_cards.counter("num_buffers", lost)
    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms, card=lost) as state:
        during = emulated_cards.counter("num_buffers", lost)
        release = begin(kind, state, emulated_cards, lost)
        fail(state)
    assert before < during <= emulated_cards.counter("num_buffers", lost)
    release()
    if kind == "run":
        emulated_cards.wait_for("run-end")
    with small_state(tmp_path / "again", emulated_cards, card=lost if kind == "run" else 0) as state:
        succeed(state)
