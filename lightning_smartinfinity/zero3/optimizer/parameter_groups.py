"""Parameter groups of the user's optimizer. DeepSpeed removes empty groups; here they are kept, as in torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from lightning_smartinfinity.errors import CheckpointError, UnsupportedError
from lightning_smartinfinity.zero3.untyped import ParamGroup, SavedState, ZeroOptimizer, ZeroParameter

__all__ = ["check_parameters", "find_changed", "restore_groups", "saved_numbers"]


def check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Check that an optimizer holds parameters to train, and that all of these belong to the model.

    Raises:
        UnsupportedError: The optimizer has no parameters to train, or it holds one that the model does not have.
    """
    name = type(optimizer).__name__
    if not any(param.requires_grad for group in optimizer.param_groups for param in group["params"]):
        raise UnsupportedError(
            f"{name} has no parameters to train: every parameter group is empty or frozen.",
            "Pass it the parameters to train. If DeepSpeed used it before, make a new optimizer.",
        )
    own = {id(param) for param in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.requires_grad and id(param) not in own:
                raise UnsupportedError(
                    f"Parameter group {number} of {name} holds a parameter of shape {_shape(param)} that "
                    f"{type(model).__name__} does not have.",
                    "Assign it to an attribute of the module, and build the optimizer from module.parameters() when "
                    "the module is complete.",
                )


def restore_groups(optimizer: ZeroOptimizer, groups: Sequence[ParamGroup]) -> tuple[int, ...]:
    """Restore the user's empty groups, which DeepSpeed has removed.

    Schedulers and checkpoints refer to groups by number.

    Args:
        optimizer: DeepSpeed's optimizer, with sub-groups whose group numbers do not count empty groups.
        groups: All groups of the user's optimizer, in their order, with their parameters.

    Returns:
        The indices of the groups that DeepSpeed kept.
    """
    left = tuple(number for number, group in enumerate(groups) if group["params"])
    numbers = optimizer.sub_group_to_group_id
    optimizer.sub_group_to_group_id = {sub_group: left[number] for sub_group, number in numbers.items()}
    optimizer.optimizer.param_groups[:] = groups
    return left


def find_changed(groups: Sequence[ParamGroup], given: Sequence[Sequence[ZeroParameter]]) -> UnsupportedError | None:
    """Return an error if the groups' parameters have changed since the training began.

    Args:
        groups: The groups of the user's optimizer.
        given: The parameters of each group at the beginning.
    """
    if len(groups) != len(given):
        return _changed(f"has {len(groups)} parameter groups, and had {len(given)}")
    for number, (group, params) in enumerate(zip(groups, given, strict=True)):
        if len(group["params"]) != len(params) or any(map(operator.is_not, group["params"], params)):
            return _changed(f"has other parameters in parameter group {number} than")
    return None


def _changed(found: str) -> UnsupportedError:
    return UnsupportedError(
        f"The optimizer {found} when the training began; the layout of its state on storage is fixed.",
        "Change hyperparameters only. Freeze a parameter by requires_grad_(False), and give all parameters that are to "
        "be trained to the optimizer when you make it.",
    )


def saved_numbers(optimizer: ZeroOptimizer, saved: Sequence[SavedState]) -> Sequence[int]:
    """Return the number of this optimizer's parameter group for each group of a checkpoint.

    Args:
        optimizer: Optimizer of this strategy.
        saved: The checkpoint's groups. Stock DeepSpeed saves no empty ones.

    Raises:
        CheckpointError: The number of groups differs, or different groups have trained parameters.
    """
    groups, left = optimizer.optimizer.param_groups, optimizer.groups_left
    numbers = left if len(saved) == len(left) else range(len(groups))
    if len(saved) != len(numbers):
        raise CheckpointError(
            f"The checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}.",
            "Give the optimizer the same parameter groups.",
        )
    trained = set(optimizer.sub_group_to_group_id.values())
    for number, group in zip(numbers, saved, strict=True):
        if (number in trained) != bool(group["params"]):
            there, here = ("none", "some") if number in trained else ("some", "none")
            raise CheckpointError(
                f"Parameter group {number} has {there} of the trained parameters in the checkpoint, and {here} here.",
                "Give the optimizer the same parameter groups.",
            )
    return numbers


def _shape(param: ZeroParameter) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))
