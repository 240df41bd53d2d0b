"""Types of options for argparse, which check text by the rules of settings in Python, and options of many commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_smartinfinity.common.progress import Show, showing_progress
from lightning_smartinfinity.settings import LOCAL_FOLDER
from lightning_smartinfinity.settings.rules import Rule, num_parameters

__all__ = [
    "add_quiet",
    "add_weights_only",
    "digits",
    "number_in",
    "parameters_in",
    "reading",
    "show_of",
    "storage_folder",
    "whole_number_in",
]

_SHOWN = 40  # characters


def digits(text: str) -> int | None:
    """Read plain digits, None for any other text: int() takes those of other scripts, and refuses very many."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


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


def add_weights_only(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a user consents to what the files of a checkpoint do when they are loaded."""
    parser.add_argument(
        "--no-weights-only",
        action="store_false",
        dest="weights_only",
        help="also load other types than tensors, numbers and text, which runs code that the files name: for "
        "checkpoints that you trust",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option that :func:`show_of` reads."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def show_of(options: argparse.Namespace) -> Show:
    """Return what shows the progress of a command."""
    return partial(showing_progress, shown=not options.quiet)


storage_folder = reading(Path, LOCAL_FOLDER)
"""Type of options that name a storage folder."""


def number_in(text: str) -> float:
    """Read a number, or NaN from other text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def parameters_in(text: str) -> float:
    """Read a number of parameters, such as "70B" or "8.4e9"."""
    number = num_parameters(text)
    return whole_number_in(text) if number is None else number


def whole_number_in(text: str) -> float:
    """Read a number, as an int if it is whole, such as "8.4e9"."""
    number = number_in(text)
    return int(number) if number.is_integer() else number
