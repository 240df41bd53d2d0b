"""Compares the hyperparameters that a script gives its optimizer with those of the training that it resumes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.zero3.untyped import ParamGroup, SavedState

__all__ = ["describe_changes", "values_of", "warn_of_changes"]

# Derived from the learning rate, which is described instead; or without effect on results.
_NOT_COMPARED = frozenset({"initial_lr", "min_lr", "params", "capturable", "differentiable", "foreach", "fused"})
_OF_SCHEDULES = frozenset({"betas", "momentum"})  # some schedulers change them, too


def values_of(groups: Sequence[ParamGroup]) -> list[SavedState]:
    """Return copies of the values of parameter groups, without their parameters."""
    return [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]


def describe_changes(saved: Sequence[SavedState], own: Sequence[SavedState]) -> list[tuple[str, str]]:
    """Return the values that differ, each as text of the script's own and of the saved value.

    Args:
        saved: Values of the groups with which the training began.
        own: Values that the script gives them now.
    """
    several = len(own) > 1
    saved, own = [_before_schedule(each) for each in saved], [_before_schedule(each) for each in own]
    return [
        (f"{key}={_shown(now[key])}{f' (parameter group {number})' if several else ''}", f"{key}={_shown(before[key])}")
        for number, (before, now) in enumerate(zip(saved, own, strict=False))
        for key in now
        if key in before and key not in _NOT_COMPARED and _shown(before[key]) != _shown(now[key])
    ]


def warn_of_changes(saved: Sequence[SavedState], own: Sequence[SavedState], *, in_checkpoint: bool = False) -> None:
    """Warn on the first rank if a resumed training keeps other hyperparameters than the script sets.

    Args:
        saved: Values of the groups with which the training began, or values in a checkpoint, from before its schedule
            if it has one. Then values that a schedule may have changed are left out.
        own: Values that the script gives them now.
        in_checkpoint: Whether they are those in a checkpoint.
    """
    by_code = in_checkpoint and not any("initial_lr" in group for group in saved)
    if in_checkpoint and not by_code:
        saved = [_unscheduled(group, present) for group, present in zip(saved, own, strict=True)]
    changes = describe_changes(saved, own)
    if not changes or dist.get_rank() != 0:
        return
    told = user_calls().describe_kept(changes, saved=f"{'was saved' if by_code else 'began'} with")
    if by_code:
        told += " Leave it if your scheduler or code has changed the value during the training."
    warnings.warn(told, stacklevel=4)


def _unscheduled(saved: SavedState, own: SavedState) -> SavedState:
    """Return the values of a saved group that no schedule has changed, and its learning rate from before the schedule.

    A OneCycleLR sets a first rate of its own. If the script makes it after the load, the rates cannot be compared.
    """
    left_out = {*_OF_SCHEDULES, *(("lr", "initial_lr") if "max_lr" in saved.keys() - own.keys() else ())}
    return {key: value for key, value in saved.items() if key not in left_out}


def _before_schedule(group: SavedState) -> SavedState:
    """Return a group's values with the script's learning rate: a warm-up that begins at 0 has multiplied it by 0."""
    return {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group


def _shown(value: object) -> str:
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    return repr(tuple(plain) if isinstance(plain, list) else plain)
