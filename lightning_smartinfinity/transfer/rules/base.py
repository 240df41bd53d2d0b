"""What an update rule is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native.steps import UpdateStep

__all__ = ["UpdateRule"]


class UpdateRule(ABC):
    """How one optimizer steps.

    Attributes:
        name: Class name of the torch optimizer, for messages.
        arrays: Names of the arrays per element on storage; the first is ``"master"``, the others are torch's
            names in ``optimizer.state``.
        telling_setting: A setting of its groups that no optimizer of another kind has.
        counts_updates: Whether torch keeps a parameter's number of updates, ``"step"``, in ``optimizer.state``.
        state_formats: Names of the state formats that its step can update.
    """

    name: str
    arrays: tuple[str, ...]
    telling_setting: str
    counts_updates: bool
    state_formats: tuple[str, ...]

    @abstractmethod
    def snapshot(self, group: Mapping[str, Any]) -> Hashable:
        """Read a param group's hyperparameters: hashable, and equal ones update equally.

        Raises:
            ConfigError: One is not a finite number in torch's range.
            UnsupportedError: One asks for something that is not offered.
        """

    @abstractmethod
    def scalars(self, hyperparameters: Any, *, step: int, gradient_scale: float) -> UpdateStep:
        """The scalars of update number ``step`` (from 1) of a parameter.

        Args:
            hyperparameters: From :meth:`snapshot`.
            step: As torch counts: this update included.
            gradient_scale: Factor on every gradient.
        """

    def first_values(self, defaults: Mapping[str, Any]) -> tuple[float, ...]:
        """What every array but the master holds before the first update.

        Args:
            defaults: Of the optimizer: what it was built with.

        Raises:
            ConfigError: One is not a finite number in torch's range.
        """
        return (0.0,) * (len(self.arrays) - 1)

    def count_after(self, hyperparameters: Any, step: int) -> int:
        """A parameter's number of updates once update number ``step`` is done; 0: the next one begins anew."""
        return step

    def holds_state(self, count: int) -> bool:
        """Whether torch would keep anything of a parameter after so many updates."""
        return True

    def number(self, name: str, value: Any, *, least: float = 0.0, below: float = math.inf) -> float:
        """A finite number in [least, below); tensors of one element count.

        Raises:
            ConfigError: It is none.
        """
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{self.name}({name}={value!r}) is not a number.", "Pass a float.") from error
        if not (least <= number < below and math.isfinite(number)):
            raise ConfigError(f"{self.name}({name}={number!r}) is out of range.", f"Keep it {_words(least, below)}.")
        return number


def _words(least: float, below: float) -> str:
    if below < math.inf:
        return f"in [{least:g}, {below:g})"
    return "finite" if least == -math.inf else "finite and not negative"
