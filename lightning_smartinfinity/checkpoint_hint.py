"""Tells people who open a checkpoint folder as if it were a file how to make a file of it.

``torch.load``, ``load_from_checkpoint`` and a Trainer with another strategy raise ``IsADirectoryError`` for our
checkpoints, and call nothing of ours before. Two things help without replacing any function of theirs:

- each checkpoint holds a file, :data:`NOTE_NAME`, which says what the folder is for;
- when such an error ends the program, what the file says is printed after the traceback. For this :func:`install`
  puts itself before ``sys.excepthook``. Notebooks do not call it.

It runs inside ``import torch``, as ``_autoload`` does: it imports the standard library only and never raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["LIGHTNING_KEY", "NOTE_NAME", "install"]

NOTE_NAME = "HOW_TO_LOAD.txt"
"""Name of the file in each checkpoint folder."""

LIGHTNING_KEY = "pytorch-lightning_version"
"""Key by which a Trainer of Lightning recognises its checkpoints."""

_LONGEST = 4096  # characters


def install() -> None:
    """Let the hook for errors that end a program print a checkpoint's note where it helps; safe to call again."""
    if getattr(sys.excepthook, "__module__", None) != __name__:
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Calls the hook that was there before, and then prints the note if the error is about a checkpoint."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        try:
            note = _note_of(error)
            if note is not None:
                sys.stderr.write(f"\n{note}")
        except Exception:  # the error was shown, and that is what counts
            return


def _note_of(error: BaseException) -> str | None:
    """Return the note in the checkpoint that was opened as a file, if that is what the error says."""
    if not isinstance(error, IsADirectoryError) or not isinstance(error.filename, (str, os.PathLike)):
        return None
    path = os.path.join(os.fspath(error.filename), NOTE_NAME)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="backslashreplace") as note:
        return note.read(_LONGEST)
