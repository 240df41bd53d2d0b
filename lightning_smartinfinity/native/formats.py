"""The state formats by name. All that the package knows of one are the traits in the native core's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_smartinfinity.native import StateFormat, state_formats
from lightning_smartinfinity.native.steps import UpdateStep

__all__ = ["STATE_FORMATS", "formats_of", "names_where"]

STATE_FORMATS: Mapping[str, StateFormat] = MappingProxyType({form.name: form for form in state_formats()})
"""By the name that users choose, in the order of their numbers."""


def formats_of(step: type[UpdateStep]) -> tuple[str, ...]:
    """The names of the formats that this kind of step can update."""
    return tuple(name for name, form in STATE_FORMATS.items() if form.step in (None, step.__name__))


def names_where(condition: Callable[[StateFormat], bool]) -> str:
    """The names of the formats that meet a condition, for a message."""
    return " or ".join(repr(name) for name, form in STATE_FORMATS.items() if condition(form))
