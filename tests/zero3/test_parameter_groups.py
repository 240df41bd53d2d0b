"""Groups of a checkpoint find those of the optimizer, optimizers are refused that cannot train, and state is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.pipeline.parameters.partitions import TensorPartition
from lightning_smartinfinity.zero3.optimizer.hyperparameters import describe_changes, values_of
from lightning_smartinfinity.zero3.optimizer.parameter_groups import check_parameters, restore_groups, saved_numbers
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from tests.helpers.waiting import LIMIT, await_that
from tests.pipeline.harness import Case, Run


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
