"""Tests when speculative updates pause and when they go on."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from lightning_smartinfinity.zero3.optimizer.speculation import Hysteresis


def guesses(hysteresis: Hysteresis, outcomes: str, num_windows: int) -> int:
    """Return how many speculative updates so many windows make, each being right ("r") or wrong ("w") in turn."""
    made = 0
    for outcome in islice(cycle(outcomes), num_windows):
        if hysteresis.allows():
            made += 1
            (hysteresis.adopted if outcome == "r" else hysteresis.discarded)()
    return made


@pytest.mark.parametrize(
    ("outcomes", "least", "most"),
    [
        *((each, 0, 79) for each in ("w", "wwr", "wrw", "rww", "wwrwr", "wwwwwwwwwr", "rrrrrrwwwwwwwww")),
        *((each, 1000, 1000) for each in ("r", "wr", "wrr", "wwrr", "wwrrrrrrrr", "wrrrrrrrrr")),
    ],
)
def test_guesses_are_few_where_most_are_wrong(outcomes: str, least: int, most: int) -> None:
    """Whatever their order, speculation pauses when most updates are wrong, and never when up to one in two is."""
    assert least <= guesses(Hysteresis(), outcomes, 1000) <= most


def until_allowed(hysteresis: Hysteresis) -> int:
    """Return the number of windows without a speculative update before the next one."""
    return next(number for number in range(100) if hysteresis.allows())


@pytest.mark.parametrize(
    ("num_adopted", "pauses"),
    [(1, (0, 16)), (2, (0, 0, 16)), (3, (0, 0, 8)), (4, (0, 0, 4)), (9, (0, 0, 4))],
)
def test_right_guesses_after_a_pause_win_back_what_was_lost(num_adopted: int, pauses: tuple[int, ...]) -> None:
    """Right updates bring the count of wrong ones to zero, then shorten the next pause, down to the first length."""
    hysteresis = Hysteresis(patience=3, first_pause=4, longest_pause=16)
    for _ in range(5):
        until_allowed(hysteresis)
        hysteresis.discarded()
    assert until_allowed(hysteresis) == 16
    for _ in range(num_adopted):
        hysteresis.adopted()
        assert until_allowed(hysteresis) == 0
    for expected in pauses:
        hysteresis.discarded()
        assert until_allowed(hysteresis) == expected
