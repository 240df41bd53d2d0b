"""Option types for argparse that check text by the settings' rules, and options that many commands share."""

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
    "named_path",
    "number_in",
    "parameters_in",
    "reading",
    "show_of",
    "storage_folder",
    "whole_number_in",
]

_SHOWN = 40  # characters


def digits(text: str) -> int | None:
    """Return the number that up to nine ASCII digits denote, or None; int() accepts other scripts' digits."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def reading(read: Callable[[str], Any], rule: Rule) -> Callable[[str], Any]:
    """Return a type for ``add_argument``.

    Args:
        read: Function that converts any text to a value.
        rule: Rule that the value must satisfy.
    """

    def typed(text: str) -> Any:
        value = read(text)
        if not rule.holds(value):
            raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} {rule.fault}. {rule.remedy}.")
        return rule.kept(value)

    return typed


def add_weights_only(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a user allows a checkpoint's files to run code when they are loaded."""
    parser.add_argument(
        "--no-weights-only",
        action="store_false",
        dest="weights_only",
        help="also load other types than tensors, numbers and text, which runs code that the files name: for "
        "checkpoints that you trust",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--quiet``, which :func:`show_of` reads."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def show_of(options: argparse.Namespace) -> Show:
    """Return the function that shows the progress of a command."""
    return partial(showing_progress, shown=not options.quiet)


named_path = reading(str, Rule("Name a file or folder; . is the current folder", bool, "names nothing", Path))
"""Type of options that name a file or folder. Path would make the current folder of an empty text."""


storage_folder = reading(named_path, LOCAL_FOLDER)
"""Type of options that name a storage folder."""


def number_in(text: str) -> float:
    """Return the number that the text denotes, or NaN."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def parameters_in(text: str) -> float:
    """Return a number of parameters from text such as "70B" or "8.4e9"."""
    number = num_parameters(text)
    return whole_number_in(text) if number is None else number


def whole_number_in(text: str) -> float:
    """Return the number that text such as "8.4e9" denotes, as an int if it is whole; NaN for other text."""
    number = number_in(text)
    return int(number) if number.is_integer() else number
