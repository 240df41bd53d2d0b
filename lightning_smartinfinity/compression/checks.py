"""Checks of codecs' settings."""

from __future__ import annotations

import math
from numbers import Real

from lightning_smartinfinity.errors import ConfigError

__all__ = ["require_bool", "require_share"]


def require_share(codec: str, name: str, value: object) -> float:
    """A number in (0, 1], numpy's as well, as Python's."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{codec}({name}={value!r}) is no number.", "Pass a number above 0 and at most 1.")
    try:
        share = float(value)
    except OverflowError:
        share = math.inf
    if not 0 < share <= 1:  # a comparison with NaN is false
        raise ConfigError(f"{codec}({name}={value!r}) is out of range.", "Pass a number above 0 and at most 1.")
    return share


def require_bool(codec: str, name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{codec}({name}={value!r}) is not a bool.", "Pass True or False.")
