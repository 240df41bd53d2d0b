"""Types of options for argparse: they read text, and check it by the same rules as settings in Python."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_smartinfinity.checks import Rule
from lightning_smartinfinity.config import LOCAL_FOLDER

__all__ = ["number_in", "reading", "storage_folder", "whole_number_in"]

_SHOWN = 40  # characters


def reading(read: Callable[[str], Any], rule: Rule) -> Callable[[str], Any]:
    """Make a type for ``add_argument``.

    Args:
        read: Turns any text into a value.
        rule: Rule for the value.
    """

    def typed(text: str) -> Any:
        value = read(text)
        if not rule.holds(value):
            raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} {rule.fault}. {rule.remedy}.")
        return rule.kept(value)

    return typed


storage_folder = reading(Path, LOCAL_FOLDER)
"""Type of options that name a storage folder."""


def number_in(text: str) -> float:
    """Read a number, or NaN from other text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def whole_number_in(text: str) -> float:
    """Read a number, as an int if it is whole, such as "8.4e9"."""
    number = number_in(text)
    return int(number) if number.is_integer() else number
