"""Writes into a checkpoint folder how it can be read."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from lightning_smartinfinity.checkpoint_hint import NOTE_NAME, instructions
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.collectives import raising_together

__all__ = ["write_note"]

_MOVED = "If the folder was moved, use its new path instead.\n"


def write_note(folder: Path, *, path: str | Path) -> None:
    """Write instructions for people who find the folder. This is a collective, in which rank zero writes.

    Args:
        folder: Folder in which the checkpoint is being saved.
        path: Path that the checkpoint will have.

    Raises:
        CheckpointError: They could not be written; raised on every rank.
    """
    with raising_together():
        if dist.get_rank() == 0:
            _write(folder / NOTE_NAME, f"{instructions(os.path.abspath(path))}{_MOVED}")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint file {file} could not be written: {error}.",
            "Free space there or save to another file system. What the path held before is still whole.",
        ) from error
