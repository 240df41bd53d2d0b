"""``auto`` chooses its overlap by measured time, alike on all ranks."""

from __future__ import annotations

import logging
from itertools import cycle, islice

import pytest

from lightning_smartinfinity.zero3.optimizer.overlap_choice import OverlapChoice
from lightning_smartinfinity.zero3.optimizer.speculation import Hysteresis


def run(choice: OverlapChoice, seconds: dict[str, float], *, steps: int = 40, jitter: bool = False) -> list[str]:
    """Return the mode of every step, each of which takes the seconds of its mode."""
    now, modes = 0.0, []
    for step in range(steps):
        choice.step_begins(now, sum_over_ranks=lambda value: value)
        modes.append(choice.mode)
        slow = 10.0 if jitter and step % 7 in (2, 3) else 1.0
        now += seconds[choice.mode] * slow
    return modes


@pytest.mark.parametrize("setting", ["none", "forward", "backward"])
def test_a_setting_is_kept(setting: str) -> None:
    assert set(run(OverlapChoice(setting), {setting: 1.0})) == {setting}


@pytest.mark.parametrize("fastest", ["forward", "backward"])
@pytest.mark.parametrize("jitter", [False, True])
def test_the_faster_is_chosen_within_eight_steps(fastest: str, jitter: bool) -> None:
    """Each mode is tried for four steps; a few slow ones, as after a validation, do not count."""
    seconds = {"forward": 1.0, "backward": 1.0, fastest: 0.8}
    modes = run(OverlapChoice("auto"), seconds, jitter=jitter)
    assert modes[:8] == 4 * ["forward"] + 4 * ["backward"] and set(modes[8:]) == {fastest}


def test_what_is_simpler_stays_where_nothing_is_gained() -> None:
    assert run(OverlapChoice("auto"), {"forward": 1.0, "backward": 0.98})[-1] == "forward"


def test_no_speculation_where_something_is_in_its_way(caplog: pytest.LogCaptureFixture) -> None:
    """The log says why speculation is left out, and a warning does so if the user asked for it."""
    with caplog.at_level(logging.INFO):
        choice = OverlapChoice("auto", obstacle="there is but one place")
    assert "'backward': there is but one place" in caplog.text
    assert set(run(choice, {"forward": 0.5})) == {"forward"}
    with pytest.warns(UserWarning, match="works as 'forward': there is but one place"):
        choice = OverlapChoice("backward", obstacle="there is but one place")
    assert set(run(choice, {"forward": 1.0})) == {"forward"}


def test_ranks_choose_alike() -> None:
    """Ranks choose by the sum of their times, so they agree although each alone finds another mode fastest."""
    measured = [{"forward": 0.9, "backward": 1.2}, {"forward": 0.9, "backward": 0.5}]
    totals = {mode: sum(of_rank[mode] for of_rank in measured) for mode in measured[0]}
    chosen = []
    for of_rank in measured:
        choice, now = OverlapChoice("auto"), 0.0
        for _ in range(40):
            choice.step_begins(now, sum_over_ranks=lambda _, choice=choice: totals[choice.mode])  # type: ignore[misc]
            now += of_rank[choice.mode]
        chosen.append(choice.mode)
    assert chosen == ["backward", "backward"]


# ---- when speculative updates pause and when they go on


def guesses(hysteresis: Hysteresis, outcomes: str, num_windows: int) -> int:
    """Return the number of speculative updates in these windows, if the outcomes ("r": right, "w": wrong) repeat."""
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
