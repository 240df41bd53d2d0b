"""Answers to names of settings that do not exist, with the name that was meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lightning_smartinfinity.checks import shown
from lightning_smartinfinity.errors import ConfigError

__all__ = ["did_you_mean", "named_settings"]

Settings = TypeVar("Settings", bound=type)


def did_you_mean(name: str, known: Iterable[str], *, written: Mapping[str, str] | None = None) -> str:
    """Return a question that names the known word most like this one, and a space; empty if none is like it.

    Args:
        name: Word that is unknown.
        known: Words to choose from.
        written: How to write some of them, if not in quotes.
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {(written or {}).get(close[0], repr(close[0]))}? " if close else ""


def named_settings(settings: Settings) -> Settings:
    """Make a dataclass answer an unknown name, or a value that lacks its name, by a ConfigError, not a TypeError.

    This is a decorator, to be written above ``@dataclass``.
    """
    decorated: Any = settings
    construct = decorated.__init__
    known = tuple(field.name for field in fields(decorated))
    most = sum(not field.kw_only for field in fields(decorated))

    @functools.wraps(construct)  # by which signatures are found
    def __init__(self: object, *values: object, **named: object) -> None:
        owner = type(self).__name__
        if len(values) > most:
            listed = ", ".join(map(shown, values))
            raise ConfigError(f"{owner}({listed}) has values without names.", _listed(known))
        unknown = sorted(named.keys() - set(known))
        if unknown:
            raise ConfigError(
                f"{owner} has no setting {unknown[0]!r}.", f"{did_you_mean(unknown[0], known)}{_listed(known)}"
            )
        construct(self, *values, **named)

    decorated.__init__ = __init__
    return settings


def _listed(known: Iterable[str]) -> str:
    return f"Its settings are {', '.join(known)}."
