"""Groups of a checkpoint find those of the optimizer, and optimizers that cannot train the model are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity import CheckpointError, UnsupportedError
from lightning_smartinfinity.zero3.optimizer.parameter_groups import (
    check_parameters,
    restore_groups,
    saved_numbers,
)


def built_by_deepspeed(*groups: list[nn.Parameter]) -> Any:
    """Return an optimizer from which DeepSpeed has removed empty groups; each of the others is one sub-group."""
    given = torch.optim.SGD([{"params": group, "lr": number} for number, group in enumerate(groups, 1)])
    everything = list(given.param_groups)
    given.param_groups[:] = [group for group in everything if group["params"]]
    numbers = dict(enumerate(range(len(given.param_groups))))
    optimizer = SimpleNamespace(optimizer=given, sub_group_to_group_id=numbers)
    optimizer.groups_left = restore_groups(optimizer, everything)
    return optimizer


def some() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def test_empty_groups_are_put_back_where_they_were() -> None:
    """The optimizer has the user's groups in the user's order, and sub-groups belong to the same ones as before."""
    optimizer = built_by_deepspeed([], some(), [], some())
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [1, 2, 3, 4]
    assert optimizer.sub_group_to_group_id == {0: 1, 1: 3}
    assert optimizer.groups_left == (1, 3)


@pytest.mark.parametrize(
    ("saved", "numbers"),
    [
        ([{"params": [0]}, {"params": [1]}], [1, 3]),
        ([{"params": []}, {"params": [0]}, {"params": []}, {"params": [1]}], [0, 1, 2, 3]),
    ],
    ids=["by stock DeepSpeed", "by this strategy"],
)
def test_groups_that_were_saved(saved: list[Any], numbers: list[int]) -> None:
    """Stock saves only groups with parameters, which belong to the groups with parameters here, in the same order."""
    assert list(saved_numbers(built_by_deepspeed([], some(), [], some()), saved)) == numbers


@pytest.mark.parametrize(
    "saved",
    [
        [{"params": [0]}, {"params": [1]}],
        [{"params": [0]}, {"params": []}, {"params": []}],
        [{"params": [0]}, {"params": []}, {"params": [1]}, {"params": []}],
    ],
    ids=["fewer", "another one is empty", "more"],
)
def test_groups_of_another_optimizer_are_refused(saved: list[Any]) -> None:
    """Settings would go to parameters that never had them."""
    with pytest.raises(CheckpointError, match="arameter group") as caught:
        saved_numbers(built_by_deepspeed([], some(), []), saved)
    assert "same parameter groups" in caught.value.remedy


def test_an_optimizer_that_trains_the_module_is_accepted() -> None:
    """Groups may be empty, and a frozen parameter may be any module's."""
    module = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    groups = [{"params": []}, {"params": list(module.parameters())}, {"params": list(frozen.parameters())}]
    check_parameters(torch.optim.SGD(groups), module)


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
