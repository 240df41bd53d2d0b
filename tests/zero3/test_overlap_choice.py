"""``auto`` chooses its overlap by measured time, alike on all ranks."""

from __future__ import annotations

import logging

import pytest

from lightning_smartinfinity.zero3.optimizer.overlap_choice import OverlapChoice


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
    assert modes[:8] == 4 * ["forward"] + 4 * ["backward"]
    assert set(modes[8:]) == {fastest}


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
