"""Kills itself during a save: ``python -m tests.training.killed_save_worker FOLDER DEVICES WHEN``.

It saves to ``last.ckpt`` after the first step, copies that to ``first.ckpt``, and saves to ``last.ckpt`` again after
the second step. WHEN names the moment of the second save at which one rank kills itself. The checkpoints also hold the
residual of compressed gradients.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_smartinfinity import SmartInfinityStrategy, TopK, TransferConfig
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.formats import tensor_file
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

RECIPE = Recipe(precision="bf16-mixed", max_steps=4)
CODEC = TopK(0.05)
TRANSFER = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}


def die_before(owner: Any, name: str, *, rank: int, count: int = 0) -> None:
    """Kill the process of this rank at a call of a function, after ``count`` calls that return."""
    call: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(count))

    def dying(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank and next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, dying)


MOMENTS: dict[str, Callable[[int], None]] = {
    "writing": lambda devices: die_before(tensor_file.TensorStream, "write", rank=devices - 1, count=4),
    "swapping": lambda devices: die_before(folder_swap, "put_save_in_place", rank=0),
    "removing": lambda devices: die_before(shutil, "rmtree", rank=0),
}


class SaveTwice(pl.Callback):
    """A callback that saves after the first and the second step."""

    def __init__(self, folder: Path, devices: int, when: str) -> None:
        self.folder, self.devices, self.when = folder, devices, when

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.folder / "last.ckpt")
            if trainer.is_global_zero:
                shutil.copytree(self.folder / "last.ckpt", self.folder / "first.ckpt")
        if trainer.global_step == 2:
            MOMENTS[self.when](self.devices)
            trainer.save_checkpoint(self.folder / "last.ckpt")


def main() -> None:
    folder, devices, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    strategy = SmartInfinityStrategy(folder / "storage", compression=CODEC, transfer=TransferConfig(**TRANSFER))
    trainer = quiet_trainer(
        folder,
        strategy,
        devices=devices,
        max_steps=RECIPE.max_steps,
        callbacks=[SaveTwice(folder, devices, when)],
    )
    trainer.fit(LitTiny(RECIPE))


if __name__ == "__main__":
    main()
