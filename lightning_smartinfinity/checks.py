"""Checks of what users set: one rule for each setting, and one form of error.

A setting of a dataclass is checked in ``__post_init__``::

    require(self, num_buffers=between(2, 4096), io_engine=one_of("auto", "threads"), tasklet_bytes=optional(COUNT))

Rules are made of each other; a rule of its own is ``Rule("Pass a plain name", str.isidentifier, "is not a name")``.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lightning_smartinfinity.errors import ConfigError

__all__ = [
    "FLAG",
    "STRATEGY",
    "Rule",
    "among",
    "between",
    "check",
    "instance",
    "number",
    "one_of",
    "optional",
    "positive",
    "require",
    "require_distinct",
    "shown",
]

STRATEGY = "the smart_infinity strategy"
"""Owner of the settings that the strategies of Trainer and Fabric share."""


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Rule:
    """Says what a setting may be.

    Args:
        remedy: What the user can do about another value, without a full stop: ``"Pass an int of at least 1"``.
        holds: Whether a value is allowed. It is given values of any type.
        fault: What is wrong with another value.
        kept: Turns an allowed value into the one that is kept, as NumPy's numbers into Python's.
    """

    remedy: str
    holds: Callable[[Any], bool]
    fault: str = "is out of range"
    kept: Callable[[Any], Any] = _unchanged


def check(owner: str, name: str, value: object, rule: Rule) -> Any:
    """Checks one setting.

    Args:
        owner: The class or function that it was passed to, or words such as :data:`STRATEGY`.
        name: Name of the setting.
        value: Its value.
        rule: What it may be.

    Returns:
        The value that is to be kept.

    Raises:
        ConfigError: The value is not allowed.
    """
    if not rule.holds(value):
        setting = f"{name}={shown(value)}"
        subject = f"{setting} of {owner}" if " " in owner else f"{owner}({setting})"
        raise ConfigError(f"{subject} {rule.fault}.", f"{rule.remedy}.")
    return rule.kept(value)


def require(settings: object, owner: str | None = None, /, **rules: Rule) -> None:
    """Checks fields of a frozen dataclass, and replaces their values by those that are to be kept.

    Args:
        settings: The dataclass.
        owner: As of :func:`check`; default: the dataclass.
        **rules: What each field may be.

    Raises:
        ConfigError: A value is not allowed.
    """
    for name, rule in rules.items():
        value = check(owner or type(settings).__name__, name, getattr(settings, name), rule)
        object.__setattr__(settings, name, value)


def between(least: int, most: int | None = None) -> Rule:
    """An integer, both ends included."""
    words = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Rule(
        f"Pass an int {words}",
        lambda value: _is_int(value) and least <= value and (most is None or value <= most),
        kept=operator.index,
    )


def number(least: float, most: float) -> Rule:
    """A number, both ends included."""
    return Rule(
        f"Pass a number from {least:g} to {most:g}",
        lambda value: _is_number(value) and least <= value <= most,  # a comparison with NaN is false
    )


def positive(most: float = math.inf) -> Rule:
    """A number above zero, kept as a float."""
    words = "" if most == math.inf else f" and at most {most}"
    return Rule(
        f"Pass a number above 0{words}", lambda value: _is_number(value) and 0 < _float(value) <= most, kept=_float
    )


def among(values: tuple[int, ...]) -> Rule:
    """One of these integers."""
    return Rule(
        f"Pass {' or '.join(map(str, values))}",
        lambda value: _is_int(value) and value in values,
        kept=operator.index,
    )


def one_of(*words: str) -> Rule:
    """One of these words."""
    return Rule(
        f"Use one of: {', '.join(words)}", lambda value: isinstance(value, str) and value in words, "is unknown"
    )


def instance(kind: type) -> Rule:
    """An instance of a class."""
    name = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
    return Rule(f"Pass {name}", lambda value: isinstance(value, kind), f"is not {name}")


def optional(rule: Rule, other: str | None = None) -> Rule:
    """What another rule allows, or one value beside: None, or a word."""
    return Rule(
        f"{rule.remedy}, or {other!r}",
        lambda value: _is_same(value, other) or rule.holds(value),
        rule.fault,
        lambda value: value if _is_same(value, other) else rule.kept(value),
    )


FLAG = Rule("Pass True or False", lambda value: isinstance(value, bool), "is not a bool")


def require_distinct(list_of_folders: str, folders: Iterable[Path]) -> None:
    """Refuses a list in which two folders are one, whatever links lead there.

    Args:
        list_of_folders: The list, as an error names it.
        folders: What is in it.

    Raises:
        ConfigError: Naming a folder that an earlier one is, too.
    """
    seen: set[str] = set()
    for folder in folders:
        place = os.path.realpath(folder)
        if place in seen:
            raise ConfigError(f"{list_of_folders} names the folder {str(folder)!r} twice.", "Name each folder once.")
        seen.add(place)


def shown(value: object) -> str:
    """Writes a value out for a message."""
    try:
        return repr(value)
    except ValueError:  # Python writes out no integers of many thousand digits
        return "<too many digits to show>"


def _is_same(value: object, other: str | None) -> bool:
    return value is other or (isinstance(value, str) and value == other)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int or a fraction too large for a float
        return math.inf if value > 0 else -math.inf
