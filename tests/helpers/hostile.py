"""An object whose pickle runs code when it is loaded, and files that need nobody's consent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

_NAME = "executed"


def executed(folder: Path) -> bool:
    """Return whether a :class:`Hostile` of this folder was loaded, and forget it."""
    mark = folder / _NAME
    ran = mark.exists()
    mark.unlink(missing_ok=True)
    return ran


class Hostile:
    """Leaves a mark in a folder when it is loaded.

    Args:
        folder: The folder.
    """

    CALLS: ClassVar[str] = "tests.helpers.hostile.leave_mark"
    """The function that the pickle names, as messages show it."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return leave_mark, (self._folder,)


def leave_mark(folder: str) -> None:
    """Leave the mark that :func:`executed` finds."""
    Path(folder, _NAME).touch()


def files_in(folder: Path) -> list[Path]:
    """Return the torch files in a folder and below it."""
    return [file for file in sorted(folder.rglob("*")) if file.suffix == ".pt" and file.is_file()]


def assert_plain(files: list[Path], least: int) -> None:
    """Assert that there are so many files, and that torch loads them without consent."""
    assert len(files) >= least
    for file in files:
        assert get_unsafe_globals_in_checkpoint(file) == [], file
        torch.load(file, weights_only=True, map_location="cpu")
