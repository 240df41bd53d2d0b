"""A process that is asked to end waits for dead disks within one limit, however many of them there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import FileQueue, HostBuffer, ask_to_end, ending_seconds, note_given_up
from tests.helpers.native_testing import EndingClock, Hold
from tests.helpers.waiting import LIMIT, await_that
from tests.native.test_deadlines import BLOCK, ENDLESS, file_of

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
