"""Prints how to load a checkpoint folder, if a user's program opened it as a file.

``torch.load``, ``load_from_checkpoint`` and a Trainer with another strategy raise ``IsADirectoryError`` for our
checkpoints before they call any code of ours. Two means help without replacing their functions:

- each checkpoint contains a file, :data:`NOTE_NAME`, which describes the folder's purpose and use;
- when such an error ends the program, the file's text is printed after the traceback. For this, :func:`install` wraps
  ``sys.excepthook``. Notebooks do not call that hook.

It runs inside ``import torch``, as ``_autoload`` does, so it imports only the standard library and never raises.
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
    """Wrap ``sys.excepthook`` so that it also prints a checkpoint's note where that helps; safe to call again."""
    if getattr(sys.excepthook, "__module__", None) != __name__:
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Calls the previous hook, and then prints the note if the error is about a checkpoint folder."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        try:
            note = _note_of(error)
            if note is not None:
                sys.stderr.write(f"\n{note}")
        except Exception:  # the previous hook has shown the error
            return


def _note_of(error: BaseException) -> str | None:
    """Return the note of the checkpoint folder that was opened as a file, or None for any other error."""
    if not isinstance(error, IsADirectoryError) or not isinstance(error.filename, (str, os.PathLike)):
        return None
    path = os.path.join(os.fspath(error.filename), NOTE_NAME)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="backslashreplace") as note:
        return note.read(_LONGEST)
