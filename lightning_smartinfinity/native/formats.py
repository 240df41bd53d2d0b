"""The state formats by name. The package knows a format only by its traits in the native core's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.native import StateFormat, UpdateStep, state_formats

__all__ = ["STATE_FORMATS", "formats_of", "names_where", "optimizers_of", "serves"]

STATE_FORMATS: Mapping[str, StateFormat] = MappingProxyType({form.name: form for form in state_formats()})
"""Formats by the name that users choose, in the order of their numbers."""


def formats_of(step: type[UpdateStep]) -> tuple[str, ...]:
    """Return the names of the formats that this kind of step can update."""
    return tuple(name for name, form in STATE_FORMATS.items() if form.step in (None, step.__name__))


def optimizers_of(form: StateFormat) -> str:
    """Return the class names of the only optimizers that a format serves, for a message."""
    return " or ".join(name for rule in RULES if rule.step == form.step for name in rule.optimizers)


def serves(form: StateFormat, optimizer: str) -> bool:
    """Return whether a format can hold the state of an optimizer, given its class name."""
    return any(optimizer in rule.optimizers and form.step in (None, rule.step) for rule in RULES)


def names_where(condition: Callable[[StateFormat], bool]) -> str:
    """Return the names of the formats that meet a condition, for a message."""
    return " or ".join(repr(name) for name, form in STATE_FORMATS.items() if condition(form))
