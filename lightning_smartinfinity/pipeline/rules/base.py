"""The interface of all update rules."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

from lightning_smartinfinity.common.update_rules import RuleDescription
from lightning_smartinfinity.native import UpdateStep
from lightning_smartinfinity.settings.rules import Rule, check

__all__ = ["UpdateRule"]


class UpdateRule(ABC):
    """Computes the scalars of one optimizer's step, and describes the state that the optimizer keeps.

    Args:
        name: Class name of the torch optimizer, for messages and checkpoints.

    Attributes:
        description: The part of the rule that the core, the cards and the simulator use.
        distinctive_setting: A setting of its groups that no optimizer of another kind has.
        counts_updates: Whether torch keeps a parameter's number of updates, ``"step"``, in ``optimizer.state``.
        state_formats: Names of the state formats that the rule can update.
    """

    description: RuleDescription
    distinctive_setting: str
    counts_updates: bool
    state_formats: tuple[str, ...]

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays per element on storage: ``"master"``, then torch's names in ``optimizer.state``."""
        return self.description.arrays

    @abstractmethod
    def snapshot(self, group: MutableMapping[str, Any]) -> Hashable:
        """Return a param group's hyperparameters as a hashable object; equal objects mean equal updates.

        Raises:
            ConfigError: A hyperparameter is not a finite number in torch's range.
            UnsupportedError: A setting asks for an unsupported feature.
        """

    @abstractmethod
    def scalars(self, hyperparameters: Any, *, step: int, gradient_scale: float) -> UpdateStep:
        """Return the scalars of a parameter's update number ``step``, counted from 1.

        Args:
            hyperparameters: Result of :meth:`snapshot`.
            step: Number of updates as torch counts them, this update included.
            gradient_scale: Factor on every gradient.
        """

    def first_values(self, defaults: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the initial value of each array except the master.

        Args:
            defaults: The optimizer's constructor arguments (``optimizer.defaults``).

        Raises:
            ConfigError: A value is not a finite number in torch's range.
        """
        return (0.0,) * (len(self.arrays) - 1)

    def count_after(self, hyperparameters: Any, step: int) -> int:
        """Return a parameter's number of updates after update number ``step``; 0 makes the next one the first."""
        return step

    def kept_arrays(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the arrays, without the master, that torch would keep with these param groups, in storage order.

        Storage has room for all arrays regardless of the groups, but checkpoints hold only these.
        """
        return self.arrays[1:]

    def holds_state(self, count: int) -> bool:
        """Return whether torch would keep any state of a parameter after ``count`` updates."""
        return True

    def number(self, name: str, value: Any, *, least: float = 0.0, below: float = math.inf) -> float:
        """Return ``value`` as a finite number in [least, below); tensors of one element are accepted.

        Raises:
            ConfigError: The value is not such a number.
        """
        return float(check(self.name, name, value, _finite(least, below)))


def _finite(least: float, below: float) -> Rule:
    at_least = f" of at least {least:g}" if least > -math.inf else ""
    less_than = f" and less than {below:g}" if below < math.inf else ""
    return Rule(
        f"Pass a finite number{at_least}{less_than}",
        lambda value: math.isfinite(_float(value)) and least <= _float(value) < below,
    )


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return math.nan
