"""Writes a note into a checkpoint folder that explains how to read it."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Collection
from pathlib import Path

from lightning_smartinfinity.checkpoint_hint import LIGHTNING_KEY, NOTE_NAME
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import writing

__all__ = ["note_for", "write_note"]

_OURS = " is a checkpoint folder of the smart_infinity strategy, no file that torch.load can read.\n"
_LONGEST = 8192  # characters; a path is shorter
_IN_LIGHTNING = """\
To go on from it or to evaluate it, pass the folder as ckpt_path, with Trainer(strategy="smart_infinity").
For torch.load, load_from_checkpoint or another strategy, make a file of it:
    smart-infinity export {path} module.ckpt --to lightning
For from_pretrained of transformers, make another folder of it:
    smart-infinity export {path} my-model
"""
_ELSEWHERE = """\
To go on from it, load it the way it was saved: by fabric.load, or within SmartInfinityTraining by
Trainer.train(resume_from_checkpoint=...) of transformers or by accelerator.load_state.
For from_pretrained, take the folder checkpoint-N that a Trainer of transformers saved as it is, or make another of it:
    smart-infinity export {path} my-model
For other code, write the weights into a folder, as model.safetensors, which load_file of safetensors reads:
    smart-infinity export {path} weights --to safetensors
"""


def note_for(path: str | Path, saved: Collection[str]) -> str:
    """Return the text of a checkpoint folder's :data:`NOTE_NAME`.

    Args:
        path: Path that the folder will have.
        saved: Keys of the state saved with the model.
    """
    folder = os.path.abspath(path)
    how = _IN_LIGHTNING if LIGHTNING_KEY in saved else _ELSEWHERE
    return f"{folder}{_OURS}{how.format(path=shlex.quote(folder))}If the folder was moved, use its new path instead.\n"


def write_note(folder: Path, saved: Collection[str], *, path: str | Path) -> None:
    """Write instructions for people who find the folder, unless a user's file has the note's name there.

    Args:
        folder: Folder in which the checkpoint is being saved.
        saved: Keys of the state saved with the model.
        path: Path that the checkpoint will have.

    Raises:
        CheckpointError: The note could not be written.
    """
    present = Path(path, NOTE_NAME)
    with writing(folder / NOTE_NAME):
        if os.path.lexists(present) and not _is_ours(present):
            warnings.warn(f"{present} is not what this package writes there, and stays.", stacklevel=2)
            return
        # The path may hold bytes that are no text.
        (folder / NOTE_NAME).write_text(note_for(path, saved), encoding="utf-8", errors="surrogateescape")


def _is_ours(note: Path) -> bool:
    if not note.is_file():
        return False
    with note.open(encoding="utf-8", errors="replace") as file:
        return _OURS in file.read(_LONGEST)
