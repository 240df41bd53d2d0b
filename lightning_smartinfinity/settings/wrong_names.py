"""Suggests the intended name for a setting that does not exist."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.settings.rules import shown

__all__ = ["closest", "did_you_mean", "named_settings"]

Settings = TypeVar("Settings", bound=type)

_ALMOST_EQUAL = 0.85
# Words for memory, and the transfer settings that users mean by them. The most similar name may be that of a count.
_MEANT = {
    frozenset({"buffer", "buffers", "ring"}): ("tasklet_bytes", "num_buffers"),
    frozenset({"cache", "dram", "memory", "ram"}): ("dram_cache_bytes",),
}
_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def did_you_mean(name: str, known: Iterable[str], *, written: Mapping[str, str] | None = None) -> str:
    """Return a "Did you mean" question with the closest known words, and a space; empty if no known word is close.

    Args:
        name: The unknown word.
        known: Words to choose from.
        written: Text to show instead of some of the known words; the others are shown in quotes.
    """
    close = closest(name, known)
    return f"Did you mean {' or '.join((written or {}).get(each, repr(each)) for each in close)}? " if close else ""


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known words that an unknown one may mean: one, none, or the two settings of the ring."""
    words = list(known)
    spoken = set(re.split("[^a-z]+", name.lower()))
    of_memory = [each for named, meant in _MEANT.items() if spoken & named for each in meant if each in words]
    almost = difflib.get_close_matches(name, words, n=1, cutoff=_ALMOST_EQUAL)
    return almost or of_memory or difflib.get_close_matches(name, words, n=1)


def named_settings(settings: Settings) -> Settings:
    """Make a class raise a ConfigError, not a TypeError, for unknown, missing, doubled and positional settings.

    Write this decorator above ``@dataclass`` if the class is a dataclass.
    """
    decorated: Any = settings
    construct = decorated.__init__
    known = dict(list(inspect.signature(construct).parameters.items())[1:])
    most = sum(parameter.kind in _PLACES for parameter in known.values())
    all_settings = f"Its settings are {', '.join(known)}."
    needed = [name for name, parameter in known.items() if parameter.default is parameter.empty]

    @functools.wraps(construct)  # keeps the signature visible to inspect
    def __init__(self: object, *values: object, **named: object) -> None:
        owner = type(self).__name__
        if len(values) > most:
            listed = ", ".join(map(shown, values))
            raise ConfigError(f"{owner}({listed}) has values without names.", all_settings)
        unknown = sorted(named.keys() - known.keys())
        if unknown:
            remedy = f"{did_you_mean(unknown[0], known)}{all_settings}"
            raise ConfigError(f"{owner} has no setting {unknown[0]!r}.", remedy)
        twice = [name for name in list(known)[: len(values)] if name in named]
        if twice:
            raise ConfigError(f"{owner} was given the setting {twice[0]!r} twice.", f"Pass {twice[0]}=... once.")
        missing = [name for name in needed[len(values) :] if name not in named]
        if missing:
            raise ConfigError(f"{owner} needs the setting {missing[0]!r}.", f"Pass {missing[0]}=... {all_settings}")
        construct(self, *values, **named)

    decorated.__init__ = __init__
    return settings
