"""Checks of codecs' settings."""

from __future__ import annotations

from lightning_smartinfinity.errors import ConfigError

__all__ = ["require_bool", "require_one_of", "require_share"]


def require_share(codec: str, name: str, value: object) -> None:
    """A number in (0, 1]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]  # a comparison with NaN is false
        raise ConfigError(f"{codec}({name}={value!r}) is out of range.", "Pass a number above 0 and at most 1.")


def require_bool(codec: str, name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{codec}({name}={value!r}) is not a bool.", "Pass True or False.")


def require_one_of(codec: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of these words."""
    if value not in choices:
        raise ConfigError(f"{codec}({name}={value!r}) is unknown.", f"Use one of: {', '.join(choices)}.")
