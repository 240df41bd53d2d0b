"""The state formats by name. The package knows a format only by its traits in the native core's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_smartinfinity.native import StateFormat, UpdateStep, state_formats

__all__ = ["STATE_FORMATS", "formats_of", "names_where"]

STATE_FORMATS: Mapping[str, StateFormat] = MappingProxyType({form.name: form for form in state_formats()})
"""Formats by the name that users choose, in the order of their numbers."""


def formats_of(step: type[UpdateStep]) -> tuple[str, ...]:
    """Return the names of the formats that this kind of step can update."""
    return tuple(name for name, form in STATE_FORMATS.items() if form.step in (None, step.__name__))


def names_where(condition: Callable[[StateFormat], bool]) -> str:
    """Return the names of the formats that meet a condition, for a message."""
    return " or ".join(repr(name) for name, form in STATE_FORMATS.items() if condition(form))
