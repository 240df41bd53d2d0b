"""Parts of the optimizer: the status of parameters, groups of parameters, and which overlap ``auto`` chooses."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_smartinfinity import SmartInfinityFabricStrategy, UnsupportedError
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.parameters.partitions import TensorPartition
from lightning_smartinfinity.zero3.optimizer.hyperparameters import describe_changes, values_of
from lightning_smartinfinity.zero3.optimizer.overlap_choice import OverlapChoice
from lightning_smartinfinity.zero3.optimizer.parameter_groups import check_parameters, restore_groups, saved_numbers
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.optimizer.speculation import Hysteresis
from lightning_smartinfinity.zero3.optimizer.taken_optimizer import refuse_foreign_steps
from lightning_smartinfinity.zero3.parameters import callers, partitioned_parameter
from lightning_smartinfinity.zero3.parameters.gathering import end_gathers
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper
from lightning_smartinfinity.zero3.parameters.status import forget_classes
from tests.helpers.waiting import LIMIT, await_that
from tests.pipeline.harness import Case, Run


@pytest.mark.parametrize("threshold", [0, 10**6], ids=["partitioned", "kept whole"])
def test_a_step_runs_no_answering_code(tmp_path: Path, threshold: int) -> None:
    """Neither forward nor backward, step or zero_grad calls a function of the modules that answer user code.

    Classes that were left with plain attributes are restored when the engine runs again.
    """
    zero = {"stage3_param_persistence_threshold": threshold}
    strategy = SmartInfinityFabricStrategy(tmp_path, overlap="none", zero=zero)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    answered: list[str] = []
    files = {callers.__file__, partitioned_parameter.__file__}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            answered.append(frame.f_code.co_qualname)

    def step() -> None:
        fabric.backward(model(torch.randn(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert answered == []
    assert float(net[0].weight.norm()) > 0
    classes = [type(param) for param in net.parameters()]
    forget_classes(net.parameters())  # as Ctrl-C within a gather may leave them
    assert [type(param) for param in net.parameters()] != classes
    end_gathers(net)
    assert [type(param) for param in net.parameters()] == classes
    strategy.close()


# ---- gathers that Ctrl-C interrupted halfway are ended


def test_gathers_are_waited_for_or_forgotten() -> None:
    """Afterwards no gather is in flight, and a parameter that was in flight counts as not gathered."""
    module: Any = torch.nn.Linear(2, 2)
    handles = [Mock(wait=Mock(side_effect=AssertionError)), Mock()]
    module.ds_inflight_param_registry = dict(enumerate(handles))
    module.weight.ds_status, module.bias.ds_status = ZeroParamStatus.INFLIGHT, ZeroParamStatus.AVAILABLE
    end_gathers(module)
    assert all(handle.wait.called for handle in handles) and not module.ds_inflight_param_registry
    statuses = (module.weight.ds_status, module.bias.ds_status)
    assert statuses == (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE) and module.bias.numel() == 2


# ---- optimizers of others may step parameters of their own, and none that ZeRO-3 has partitioned


@pytest.mark.parametrize("comes_late", [False, True])
def test_steps_of_partitioned_parameters_are_refused(comes_late: bool) -> None:
    """An optimizer that was accepted is looked at again when it has more parameters, or there is a new engine."""
    refuse_foreign_steps()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(params[:2] if comes_late else params, lr=0.1)
    for _ in range(2):
        optimizer.step()
    params[2].ds_status, params[2].ds_shape = None, (2,)  # type: ignore[attr-defined]
    if comes_late:
        optimizer.add_param_group({"params": params[2:]})
    else:
        refuse_foreign_steps()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="ZeRO-3"):
            optimizer.step()


# ---- writing of parameters ends whole, whatever fails on the way


FULL = StorageError("The disk is full.", "Free some space.")


@pytest.mark.parametrize(
    ("starts", "ends", "raised", "awaited"),
    [({2: FULL}, {}, StorageError, [0, 1]), ({}, {0: FULL, 1: KeyboardInterrupt()}, KeyboardInterrupt, [0, 1, 2])],
    ids=["a write that cannot be started", "an interrupt among writes"],
)
def test_writes_that_were_started_are_finished(
    starts: dict[int, BaseException],
    ends: dict[int, BaseException],
    raised: type[BaseException],
    awaited: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They release their memory whichever start or end fails, and an interrupt is what is raised."""
    settings: Any = SimpleNamespace()
    swapper: Any = ParameterSwapper(settings)
    # A mock raises what is an error, and returns the rest.
    finish = Mock(side_effect=[ends.get(number) for number in range(3)])
    monkeypatch.setattr(swapper, "_store", SimpleNamespace(finish=finish))
    monkeypatch.setattr(swapper, "_together", nullcontext)
    monkeypatch.setattr(swapper, "_start_write", Mock(side_effect=[starts.get(number, number) for number in range(3)]))
    monkeypatch.setattr(swapper, "remove_partition_and_release_buffers", lambda params: None)
    with pytest.raises(raised):
        swapper.swap_out_and_release([0, 1, 2])
    assert [ticket for (ticket,), _ in finish.call_args_list] == awaited


# ---- groups of a checkpoint find those of the optimizer, and optimizers that cannot train the model are refused


@pytest.mark.parametrize(
    ("saved", "numbers"),
    [
        ([{"params": [0]}, {"params": [1]}], [1, 3]),
        ([{"params": []}, {"params": [0]}, {"params": []}, {"params": [1]}], [0, 1, 2, 3]),
    ],
    ids=["by stock DeepSpeed", "by this strategy"],
)
def test_groups_that_were_saved(saved: list[Any], numbers: list[int]) -> None:
    """Stock saves only groups with parameters, which belong to the groups with parameters here, in the same order.

    DeepSpeed has removed the empty groups, and they were put back where they were.
    """
    params = [[], [nn.Parameter(torch.ones(2))], [], [nn.Parameter(torch.ones(2))]]
    given = torch.optim.SGD([{"params": group, "lr": number} for number, group in enumerate(params, 1)])
    everything = list(given.param_groups)
    given.param_groups[:] = [group for group in everything if group["params"]]
    optimizer: Any = SimpleNamespace(optimizer=given, sub_group_to_group_id={0: 0, 1: 1})
    optimizer.groups_left = restore_groups(optimizer, everything)
    assert [group["lr"] for group in given.param_groups] == [1, 2, 3, 4]
    assert (optimizer.groups_left, optimizer.sub_group_to_group_id) == ((1, 3), {0: 1, 1: 3})
    assert list(saved_numbers(optimizer, saved)) == numbers


@pytest.mark.parametrize("schedule", [None, lambda step: min(1.0, step / 4), lambda step: 1.0])
def test_a_changed_learning_rate(schedule: Callable[[int], float] | None) -> None:
    """It is described as the script sets it, although a scheduler, as of a warm-up from 0, has changed it already."""

    def values(lr: float) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)
        if schedule is not None:
            LambdaLR(optimizer, schedule)
        return values_of(optimizer.param_groups)

    assert describe_changes(values(0.04), values(0.08)) == [("lr=0.08", "lr=0.04")]
    assert describe_changes(values(0.04), values(0.04)) == []


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([[]], "SGD has no parameters to train"),
        ([[nn.Parameter(torch.ones(2), requires_grad=False)]], "SGD has no parameters to train"),
        ([[], [nn.Parameter(torch.ones(3, 5))]], r"group 1 of SGD .* shape \(3, 5\) that Linear does not have"),
    ],
    ids=["empty", "frozen", "of another module"],
)
def test_an_optimizer_that_cannot_train_the_module_is_refused(groups: list[list[nn.Parameter]], told: str) -> None:
    """Torch accepts empty groups. The error of a foreign parameter names group and shape."""
    with pytest.raises(UnsupportedError, match=told):
        check_parameters(torch.optim.SGD([{"params": group} for group in groups]), nn.Linear(2, 2))


# ---- the function that closes the state of a training that was dropped


@pytest.mark.parametrize("keep", [False, True])
def test_called_by_the_thread_that_moves_parameters(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run there: the thread does not wait for itself, and the state is closed."""
    run = Run(tmp_path, Case(staged=True, num_buffers=2, keep=keep))
    rank_state = RankState(keep=keep)
    rank_state.hold_handler(run.handler)
    closers: list[Callable[[], None]] = [rank_state.closer()]
    put, begun = TensorPartition.put, threading.Event()

    def collected(partition: TensorPartition, sub_group: int, offset: int, values: torch.Tensor) -> None:
        begun.wait(LIMIT)
        if closers:
            closers.pop()()
        put(partition, sub_group, offset, values)

    monkeypatch.setattr(TensorPartition, "put", collected)
    run.handler.begin_step(run.collect(1))
    begun.set()
    await_that(lambda: not run.handler.in_flight, seconds=30)
    await_that(lambda: not any(t.name.startswith("smart-infinity") for t in threading.enumerate()), seconds=30)
    assert run.handler.generation == int(keep) and bool(list(tmp_path.rglob("*.bin"))) == keep
    run.arena.close()


# ---- ``auto`` chooses its overlap by measured time, alike on all ranks


def run(choice: OverlapChoice, seconds: dict[str, float], *, steps: int = 40, jitter: bool = False) -> list[str]:
    """Return the mode of every step, each of which takes the seconds of its mode."""
    now, modes = 0.0, []
    for step in range(steps):
        choice.step_begins(now, sum_over_ranks=lambda value: value)
        modes.append(choice.mode)
        now += seconds[choice.mode] * (10.0 if jitter and step % 7 in (2, 3) else 1.0)
    return modes


@pytest.mark.parametrize("setting", ["none", "forward", "backward"])
def test_a_setting_is_kept(setting: str) -> None:
    assert set(run(OverlapChoice(setting), {setting: 1.0})) == {setting}


@pytest.mark.parametrize("fastest", ["forward", "backward"])
@pytest.mark.parametrize("jitter", [False, True])
def test_the_faster_is_chosen_within_eight_steps(fastest: str, jitter: bool) -> None:
    """Each mode is tried for four steps; a few slow ones, as after a validation, do not count."""
    modes = run(OverlapChoice("auto"), {"forward": 1.0, "backward": 1.0, fastest: 0.8}, jitter=jitter)
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
