"""What fields of this package's dataclasses may be, checked once at construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from lightning_smartinfinity.config import shown
from lightning_smartinfinity.errors import ConfigError

__all__ = [
    "COUNT",
    "FLAG",
    "ITEM_BYTES",
    "RATE",
    "SECONDS",
    "Rule",
    "between",
    "instance",
    "optional",
    "require",
    "require_one",
    "share",
]

_LEAST_RATE, _MOST_RATE = 1.0, 1e18
_LEAST_SECONDS, _MOST_SECONDS = 1e-18, 1e6


@dataclass(frozen=True)
class Rule:
    """What a value may be.

    Args:
        words: The same for people, after "Pass".
        holds: Whether a value is that; whatever its type.
    """

    words: str
    holds: Callable[[Any], bool]


def require(figures: object, **rules: Rule) -> None:
    """Each of these fields of a dataclass is what its rule says.

    Raises:
        ConfigError: One is not; names the class, the field and its value.
    """
    for name, rule in rules.items():
        require_one(type(figures).__name__, name, getattr(figures, name), rule)


def require_one(owner: str, name: str, value: object, rule: Rule) -> None:
    """The same of one argument.

    Args:
        owner: The class or function that it was passed to.
        name: Of the argument.
        value: Of the argument.
        rule: What it may be.

    Raises:
        ConfigError: It is not.
    """
    if not rule.holds(value):
        raise ConfigError(f"{owner}({name}={shown(value)}) is out of range.", f"Pass {rule.words}.")


def between(least: int, most: int) -> Rule:
    """An integer, both ends included."""
    return Rule(f"an int from {least} to {most}", lambda value: _is_int(value) and least <= value <= most)


def share(most: float) -> Rule:
    """A part of something."""
    return Rule(f"a number above 0 and at most {most}", lambda value: _is_number(value) and 0 < value <= most)


def instance(kind: type) -> Rule:
    """Of a class."""
    return Rule(f"a {kind.__name__}", lambda value: isinstance(value, kind))


def optional(rule: Rule) -> Rule:
    """Or None."""
    return Rule(f"{rule.words}, or None", lambda value: value is None or rule.holds(value))


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


COUNT = between(1, 1_000_000)
"""Of parts of a machine."""
FLAG = Rule("True or False", lambda value: isinstance(value, bool))
ITEM_BYTES = Rule("2 or 4", lambda value: _is_int(value) and value in (2, 4))
RATE = Rule(
    f"a number from {_LEAST_RATE:g} to {_MOST_RATE:g}",
    lambda value: _is_number(value) and _LEAST_RATE <= value <= _MOST_RATE,
)
"""Of bytes per second: no resource is so slow or so fast that a sum of times loses it."""
SECONDS = Rule(
    f"0, or a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}",
    lambda value: _is_number(value) and (value == 0 or _LEAST_SECONDS <= value <= _MOST_SECONDS),
)
"""Per parameter."""
