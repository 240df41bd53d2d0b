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


@pytest.mark.parametrize("outcomes", ["w", "wwr", "wrw", "rww", "wwrwr", "wwwwwwwwwr", "rrrrrrwwwwwwwww"])
def test_guesses_most_of_which_are_wrong_are_few(outcomes: str) -> None:
    """Few speculative updates are made when most are wrong, whatever their order."""
    assert guesses(Hysteresis(), outcomes, 1000) < 80


@pytest.mark.parametrize("outcomes", ["r", "wr", "wrr", "wwrr", "wwrrrrrrrr", "wrrrrrrrrr"])
def test_guesses_most_of_which_are_right_never_pause(outcomes: str) -> None:
    """Speculation never pauses when one update in ten, or up to one in two, is wrong."""
    assert guesses(Hysteresis(), outcomes, 1000) == 1000


def until_allowed(hysteresis: Hysteresis) -> int:
    """Return the number of windows without a speculative update before the next one."""
    return next(number for number in range(100) if hysteresis.allows())


def test_pauses_grow_while_guesses_are_wrong() -> None:
    """A pause follows three wrong updates; each further wrong one doubles it, up to the longest."""
    hysteresis = Hysteresis(patience=3, first_pause=4, longest_pause=8)
    for expected in (0, 0, 0, 4, 8, 8):
        assert until_allowed(hysteresis) == expected
        hysteresis.discarded()
    assert until_allowed(hysteresis) == 8


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
