"""Saves after every step of a training, and looks at what lies there after each save."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity.common.progress import showing_progress
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint

__all__ = ["OVER", "Looking", "kept_checkpoints"]

OVER = 3
"""Paths over which the saves go that no callback makes."""


def kept_checkpoints(folder: Path) -> ModelCheckpoint:
    """Return a callback that saves after every step and keeps the newest two, and the last under a name of its own."""
    newest = {"monitor": "step", "mode": "max", "save_top_k": 2, "save_last": True}
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **newest)  # type: ignore[arg-type]


class Looking(pl.Callback):
    """A callback that saves after every step, too, and notes on rank 0 the steps of the checkpoints that lie there.

    Args:
        folder: Folder of the checkpoints.
        seen_at: The same folder where no look-up is remembered.

    Attributes:
        found: For each step the names of what lies there, with the step that is saved in it, or what is wrong with it.
    """

    def __init__(self, folder: Path, *, seen_at: Path) -> None:
        self.folder, self.seen_at = folder, seen_at
        self.found: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step:
            self.save_and_look(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save_and_look(trainer)

    def save_and_look(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.folder / f"over-{trainer.global_step % OVER}.ckpt")
        dist.barrier()
        if dist.get_rank() == 0:
            self.found.append({path.name: step_of(path) for path in sorted(self.seen_at.iterdir())})
        dist.barrier()


def step_of(path: Path) -> Any:
    """Return the step that both ranks have saved in a checkpoint, or what is wrong with it."""
    scrubbed = scrub_checkpoint(path, show=partial(showing_progress, shown=False))
    if scrubbed.damaged or scrubbed.unknown:
        return [*scrubbed.damaged, *scrubbed.unknown]
    files = sorted(path.glob("checkpoint/zero_pp_rank_*_model_states.pt"))
    (step,) = {torch.load(file, weights_only=False)["global_step"] for file in files}
    return step
