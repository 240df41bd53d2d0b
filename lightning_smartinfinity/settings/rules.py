"""Checks of users' settings: one rule for each setting, and one form of error.

A setting of a dataclass is checked in ``__post_init__``::

    require(self, num_buffers=NUM_BUFFERS, direct_io=one_of("auto", "on", "off"), keep=FLAG)

Rules can be composed. A new rule is ``Rule("Pass a plain name", str.isidentifier, "is not a name")``.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lightning_smartinfinity.errors import ConfigError

__all__ = [
    "FLAG",
    "STRATEGY",
    "Rule",
    "among",
    "as_passed",
    "between",
    "check",
    "in_bytes",
    "in_seconds",
    "instance",
    "num_bytes",
    "num_parameters",
    "number",
    "one_of",
    "optional",
    "positive",
    "require",
    "require_distinct",
    "settings_of",
    "shown",
    "steps_or_time",
]

STRATEGY = "the smart_infinity strategy"
"""Owner of the settings that the strategies of Trainer and Fabric share."""

_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(|[kmgt]i?)b?\s*", re.ASCII | re.IGNORECASE)
_TIME = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h)\s*", re.ASCII)
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_MOST_BYTES = (1 << 63) - 1  # the native core counts in signed 64 bits
_UNITS = {"": 1} | {
    unit + suffix: base**power
    for power, unit in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}


_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMBT])\s*", re.ASCII | re.IGNORECASE)
_THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def num_parameters(text: str) -> int | None:
    """Return the number of parameters in a text such as "124M" or "70B"; None for any other text."""
    match = _NUMBER.fullmatch(text)
    return round(float(match[1]) * _THOUSANDS[match[2].upper()]) if match else None


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Rule:
    """Defines the allowed values of a setting.

    Args:
        remedy: Advice for a forbidden value, without a full stop: ``"Pass an int of at least 1"``.
        holds: Returns whether a value, of any type, is allowed.
        fault: Predicate that describes a forbidden value: ``"is not a bool"``.
        kept: Converts an allowed value to the value to keep, such as a NumPy number to a Python one.
    """

    remedy: str
    holds: Callable[[Any], bool]
    fault: str = "is out of range"
    kept: Callable[[Any], Any] = _unchanged


def check(owner: str, name: str, value: object, rule: Rule) -> Any:
    """Check one setting.

    Args:
        owner: Class or function to which the setting was passed, or words such as :data:`STRATEGY`.
        name: Name of the setting.
        value: Its value.
        rule: Rule for its value.

    Returns:
        The value to keep.

    Raises:
        ConfigError: The value is not allowed.
    """
    if not rule.holds(value):
        raise ConfigError(f"{as_passed(owner, name, value)} {rule.fault}.", f"{rule.remedy}.")
    return rule.kept(value)


def as_passed(owner: str, name: str, value: object) -> str:
    """Format a setting as it was passed to its owner; the owner is as in :func:`check`."""
    setting = f"{name}={shown(value)}"
    return f"{setting} of {owner}" if " " in owner else f"{owner}({setting})"


def require(settings: object, owner: str | None = None, /, **rules: Rule) -> None:
    """Check fields of a frozen dataclass, and replace each value by the one to keep.

    Args:
        settings: The dataclass.
        owner: Owner as in :func:`check`; by default the name of the dataclass.
        **rules: Rule for each field, by name.

    Raises:
        ConfigError: A value is not allowed.
    """
    for name, rule in rules.items():
        value = check(owner or type(settings).__name__, name, getattr(settings, name), rule)
        object.__setattr__(settings, name, value)


def between(least: int, most: int | None = None) -> Rule:
    """Allow an integer from ``least`` to ``most``, both included."""
    words = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Rule(
        f"Pass an int {words}",
        lambda value: _is_int(value) and least <= value and (most is None or value <= most),
        kept=operator.index,
    )


def num_bytes(least: int, most: int = _MOST_BYTES) -> Rule:
    """Allow a number of bytes from ``least`` to ``most``, as an integer or text such as ``"8GB"``; keep an int."""
    whole = between(least, most)
    return Rule(
        f"Pass a number of bytes from {least} to {most}, or text such as '64MB' (64 * 10^6) or '64MiB' (64 * 2^20)",
        lambda value: whole.holds(in_bytes(value)),
        "is no size in the allowed range",
        kept=in_bytes,
    )


def in_bytes(size: Any) -> int | None:
    """Return the bytes of a size, or None if the value is not a size.

    Args:
        size: An integer, or text: a number and an optional unit, in upper or lower case. ``"5GB"`` and ``"5G"`` are 5 *
            10^9 bytes, ``"5GiB"`` and ``"5Gi"`` are 5 * 2^30. Fractions of a byte are dropped.
    """
    if _is_int(size):
        return operator.index(size)
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    return None if found is None else int(Fraction(found[1]) * _UNITS[found[2].lower()])


def steps_or_time() -> Rule:
    """Allow a number of steps, at least 1, or a time above zero as text: a number and ``s``, ``min`` or ``h``."""
    return Rule(
        "Pass a number of steps, or a time such as '90s' or '10min'",
        lambda value: operator.index(value) >= 1 if _is_int(value) else bool(in_seconds(value)),
        kept=lambda value: operator.index(value) if _is_int(value) else value,
    )


def in_seconds(time: object) -> float | None:
    """Return the seconds of a time as text, such as ``"10min"``; None for any other value."""
    found = _TIME.fullmatch(time) if isinstance(time, str) else None
    return None if found is None else float(found[1]) * _SECONDS[found[2]]


def number(least: float, most: float) -> Rule:
    """Allow a number from ``least`` to ``most``, both included."""
    return Rule(
        f"Pass a number from {least:g} to {most:g}",
        lambda value: _is_number(value) and least <= value <= most,  # a comparison with NaN is false
        kept=lambda value: operator.index(value) if _is_int(value) else float(value),
    )


def positive(most: float = math.inf) -> Rule:
    """Allow a number above zero, and keep it as a float."""
    words = "" if most == math.inf else f" and at most {most}"
    return Rule(
        f"Pass a number above 0{words}", lambda value: _is_number(value) and 0 < _float(value) <= most, kept=_float
    )


def among(values: tuple[int, ...]) -> Rule:
    """Allow one of these integers."""
    return Rule(
        f"Pass {' or '.join(map(str, values))}",
        lambda value: _is_int(value) and value in values,
        kept=operator.index,
    )


def one_of(*words: str) -> Rule:
    """Allow one of these words."""
    return Rule(
        f"Use one of: {', '.join(map(repr, words))}",
        lambda value: isinstance(value, str) and value in words,
        "is unknown",
    )


def instance(kind: type) -> Rule:
    """Allow an instance of a class."""
    name = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
    return Rule(f"Pass {name}", lambda value: isinstance(value, kind), f"is not {name}")


def settings_of(kind: type) -> Rule:
    """Allow an instance of a settings class, or a mapping of settings by name, which becomes an instance."""
    rule = instance(kind)
    return Rule(
        f"{rule.remedy}, or a dict of its settings",
        lambda value: rule.holds(value) or _has_names(value),
        f"{rule.fault} and no dict of its settings",
        lambda value: value if rule.holds(value) else kind(**value),
    )


def optional(rule: Rule, other: str | None = None) -> Rule:
    """Allow the values of another rule, and one more: None, or a word."""
    return Rule(
        f"{rule.remedy}, or {other!r}",
        lambda value: _is_same(value, other) or rule.holds(value),
        rule.fault,
        lambda value: value if _is_same(value, other) else rule.kept(value),
    )


FLAG = Rule("Pass True or False", lambda value: isinstance(value, bool), "is not a bool")


def require_distinct(list_of_folders: str, folders: Iterable[Path]) -> None:
    """Raise if a list names one folder twice, even by different links.

    Args:
        list_of_folders: The list, as named in an error.
        folders: Folders of the list.

    Raises:
        ConfigError: A folder occurs twice; the message names it.
    """
    seen: set[str] = set()
    for folder in folders:
        place = os.path.realpath(folder)
        if place in seen:
            raise ConfigError(f"{list_of_folders} names the folder {str(folder)!r} twice.", "Name each folder once.")
        seen.add(place)


def shown(value: object) -> str:
    """Format a value for a message."""
    try:
        return repr(value)
    except ValueError:  # Python does not format integers of many thousand digits
        return "<too many digits to show>"


def _is_same(value: object, other: str | None) -> bool:
    return value is other or (isinstance(value, str) and value == other)


def _has_names(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int or a fraction too large for a float
        return math.inf if value > 0 else -math.inf
