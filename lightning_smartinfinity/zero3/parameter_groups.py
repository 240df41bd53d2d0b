"""Parameter groups of the user's optimizer. DeepSpeed removes the empty ones; here they stay, as torch keeps them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from lightning_smartinfinity.errors import CheckpointError, UnsupportedError
from lightning_smartinfinity.zero3.untyped import ParamGroup, SavedState, ZeroOptimizer, ZeroParameter

__all__ = ["check_parameters", "restore_groups", "saved_numbers", "take_parameters"]

# Optimizers whose parameters a training has taken. Their groups look empty, or hold what was added afterwards.
_TAKEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Check that an optimizer holds parameters to train, and that all of them are the model's.

    Raises:
        UnsupportedError: An earlier training has taken the optimizer's parameters, it never had any to train, or it
            holds one that the model does not have.
    """
    name = type(optimizer).__name__
    if optimizer in _TAKEN:
        raise UnsupportedError(
            f"This {name} was used by an earlier training, which took its parameters: its parameter groups are empty.",
            "Make a new optimizer for each training: build it in configure_optimizers, or before each fabric.setup.",
        )
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
    """Put the user's empty groups back, from which DeepSpeed has removed them.

    Schedulers count groups, and so do checkpoints.

    Args:
        optimizer: DeepSpeed's optimizer with its sub-groups made, which number the groups that are left.
        groups: All groups of the user's optimizer, in their order, with their parameters.

    Returns:
        The indices of the groups that DeepSpeed left.
    """
    left = tuple(number for number, group in enumerate(groups) if group["params"])
    numbers = optimizer.sub_group_to_group_id
    optimizer.sub_group_to_group_id = {sub_group: left[number] for sub_group, number in numbers.items()}
    optimizer.optimizer.param_groups[:] = groups
    return left


def take_parameters(optimizer: torch.optim.Optimizer) -> list[ZeroParameter]:
    """Remove all parameters from the groups of the user's optimizer, and return those that are frozen."""
    frozen: list[ZeroParameter] = []
    for group in optimizer.param_groups:
        frozen += [param for param in group["params"] if not param.requires_grad]
        group["params"] = []
    optimizer.state.clear()  # Adagrad's constructor puts a whole array there
    _TAKEN.add(optimizer)
    return frozen


def saved_numbers(optimizer: ZeroOptimizer, saved: Sequence[SavedState]) -> Sequence[int]:
    """Return the number of this optimizer's parameter group for each group of a checkpoint.

    Args:
        optimizer: Optimizer of this strategy.
        saved: The checkpoint's groups. Stock DeepSpeed saves no empty ones.

    Raises:
        CheckpointError: There are more groups or fewer, or others are empty.
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
