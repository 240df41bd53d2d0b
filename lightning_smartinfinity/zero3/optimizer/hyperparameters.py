"""Compares the hyperparameters that a script gives its optimizer with those of the training that it resumes."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from lightning_smartinfinity.zero3.untyped import ParamGroup, SavedState

__all__ = ["describe_changes", "values_of"]

# Derived from the learning rate, which is described instead.
_DERIVED = frozenset({"initial_lr", "min_lr", "params"})


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
        if key in before and key not in _DERIVED and _shown(before[key]) != _shown(now[key])
    ]


def _before_schedule(group: SavedState) -> SavedState:
    """Return a group's values with the script's learning rate: a warm-up that begins at 0 has multiplied it by 0."""
    return {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group


def _shown(value: object) -> str:
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    return repr(tuple(plain) if isinstance(plain, list) else plain)
