"""A process that is asked to end waits for dead disks within one limit, however many of them there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import FileQueue, HostBuffer, ask_to_end, ending_seconds, note_given_up
from tests.helpers.native_testing import EndingClock, Hold
from tests.helpers.waiting import LIMIT, await_that
from tests.native.test_deadlines import BLOCK, ENDLESS, file_of

FIRST, LATER, LEAST, LASTS = 3.0, 1.0, 0.1, 10.0


@pytest.fixture
def clock() -> EndingClock:
    """A clock that was asked at 100."""
    made = EndingClock()
    made.ask(100.0)
    return made


def test_nobody_asked() -> None:
    """Waits have their own limits, and one that is given up shortens no other."""
    clock = EndingClock()
    clock.abandon(0.0, 60.0)
    assert clock.limit(60.0) is None
    clock.ask(61.0)
    assert clock.limit(61.0) == (FIRST, 61.0)


def test_waits_that_are_answered(clock: EndingClock) -> None:
    """Each has its three seconds: a disk that is busy is not given up because the process ends."""
    for now in (100.0, 104.0, 109.9):
        assert clock.limit(now) == (FIRST, 100.0)


def test_waits_after_the_first_that_is_given_up(clock: EndingClock) -> None:
    """They share a second; when it is spent, each has a moment in which a disk that works may answer."""
    clock.abandon(99.0, 103.0)
    assert clock.limit(103.0) == (LATER, 103.0)
    clock.abandon(103.5, 103.9)
    assert clock.limit(104.0) == (pytest.approx(0.6), 103.9)
    clock.abandon(104.0, 105.0)
    assert clock.limit(105.0) == (LEAST, 105.0)


def test_waits_at_the_same_time(clock: EndingClock) -> None:
    """They count once, as they end together."""
    for _ in range(5):
        clock.abandon(100.0, 103.0)
    assert clock.limit(103.0) == (LATER, 103.0)
    for _ in range(5):
        clock.abandon(103.0, 103.25)
    assert clock.limit(103.25) == (0.75, 103.25)


def test_asked_again(clock: EndingClock) -> None:
    """The limits do not start anew, as Ctrl-C may be pressed any number of times, but last longer."""
    clock.abandon(100.0, 103.0)
    clock.ask(108.0)
    assert clock.limit(108.0 + LASTS - 0.1) == (LATER, 103.0)
    assert clock.limit(108.0 + LASTS) is None
    clock.ask(130.0)
    assert clock.limit(130.0) == (FIRST, 130.0)


def test_taken_back(clock: EndingClock) -> None:
    """A disk that has answered has its own limits again, and those of an end when it is asked anew."""
    clock.abandon(100.0, 103.0)
    clock.take_back()
    assert clock.limit(103.0) is None
    clock.ask(104.0)
    assert clock.limit(104.0) == (FIRST, 104.0)


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
