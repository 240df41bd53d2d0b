"""Types of options for argparse: text is read, and refused by the same rules as settings in Python."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from lightning_smartinfinity.checks import Rule

__all__ = ["number_in", "reading", "whole_number_in"]

_SHOWN = 40  # characters


def reading(read: Callable[[str], Any], rule: Rule) -> Callable[[str], Any]:
    """Makes a type for ``add_argument``.

    Args:
        read: Turns text into a value, whatever the text.
        rule: What the value may be.
    """

    def typed(text: str) -> Any:
        value = read(text)
        if not rule.holds(value):
            raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} {rule.fault}. {rule.remedy}.")
        return rule.kept(value)

    return typed


def number_in(text: str) -> float:
    """Reads a number; of other text, NaN."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def whole_number_in(text: str) -> float:
    """Reads a number, which is an int if it is whole: "8.4e9" is."""
    number = number_in(text)
    return int(number) if number.is_integer() else number
