"""Tells people who open a checkpoint folder as if it were a file how to make a file of it.

``torch.load``, ``load_from_checkpoint`` and a Trainer with another strategy raise ``IsADirectoryError`` for our
checkpoints, and call nothing of ours before. Two things help without replacing any function of theirs:

- each checkpoint holds a file, :data:`NOTE_NAME`, which says what the folder is for;
- when such an error ends the program, the same is printed after the traceback. For this :func:`install` puts itself
  before ``sys.excepthook``. Notebooks do not call it.

It runs inside ``import torch``, as ``_autoload`` does: it imports the standard library only and never raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["NOTE_NAME", "install", "instructions"]

NOTE_NAME = "HOW_TO_LOAD.txt"
"""Name of the file in each checkpoint folder."""


def instructions(folder: str) -> str:
    """Return the lines that say how a checkpoint folder can be read.

    Args:
        folder: Path of the folder.
    """
    import shlex  # imported here, since every import of torch runs this module

    path = shlex.quote(folder)
    return f"""\
{folder} is a checkpoint folder of the smart_infinity strategy, no file that torch.load can read.
To go on from it or to evaluate it, pass the folder as ckpt_path, with Trainer(strategy="smart_infinity").
For torch.load, load_from_checkpoint or another strategy, make a file of it:
    smart-infinity export {path} module.ckpt --to lightning
For from_pretrained of transformers, make another folder of it:
    smart-infinity export {path} my-model
"""


def install() -> None:
    """Let the hook for errors that end a program print these instructions where they help; safe to call again."""
    if getattr(sys.excepthook, "__module__", None) != __name__:
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Calls the hook that was there before, and then prints the instructions if the error is about a checkpoint."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        try:
            folder = _checkpoint_of(error)
            if folder is not None:
                sys.stderr.write(f"\n{instructions(folder)}")
        except Exception:  # the error was shown, and that is what counts
            return


def _checkpoint_of(error: BaseException) -> str | None:
    """Return the path of the checkpoint that was opened as a file, if that is what the error says."""
    if not isinstance(error, IsADirectoryError) or not isinstance(error.filename, (str, os.PathLike)):
        return None
    folder = os.fspath(error.filename)
    return str(folder) if os.path.isfile(os.path.join(folder, NOTE_NAME)) else None
