"""Reads what the scripts are given, on the command line and in files of JSON lines, and answers mistakes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least this minimum."""

    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return number


def lines_of(path: Path) -> dict[str, str]:
    """Return the lines of a file that are not empty, each by the file and the number of the line.

    Raises:
        ValueError: There is no such file, or it is not in UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error.reason} at byte {error.start}.") from None
    return {f"{path}:{number}": line for number, line in enumerate(lines, start=1) if line.strip()}
