"""Trains, saves and evaluates on two processes: ``... evaluation_worker ROOT CHECKPOINT``.

The evaluated checkpoint was saved by one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch

from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

RECIPE = Recipe(precision="bf16-mixed", groups=True, frozen=True, odd=True, validate=True)


class Buffered(LitTiny):
    """A module that counts its steps in a buffer and keeps the values that it loaded."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("seen", torch.zeros(1))
        self.loaded: dict[str, torch.Tensor] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        with deepspeed.zero.GatheredParameters(list(self.parameters())):
            self.loaded = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}


def train_and_save(
    trainer: pl.Trainer, path: Path, recipe: Recipe = RECIPE, *, module_class: type[Buffered] = Buffered
) -> None:
    """Train for a few steps and save a checkpoint."""
    trainer.fit(module_class(recipe))
    trainer.save_checkpoint(path)
    trainer.strategy.close()  # type: ignore[attr-defined]


def evaluated_values(
    trainer: pl.Trainer,
    path: Path,
    recipe: Recipe = RECIPE,
    *,
    strict: bool = True,
    module_class: type[Buffered] = Buffered,
) -> dict[str, torch.Tensor]:
    """Validate a zeroed module from a checkpoint and return all its values."""
    module: Any = module_class(recipe)
    for tensor in (*module.parameters(), *module.buffers()):
        torch.nn.init.zeros_(tensor)
    module.strict_loading = strict
    trainer.validate(module, ckpt_path=path, verbose=False)
    return module.loaded  # type: ignore[no-any-return]


def main() -> None:
    root, checkpoint = map(Path, sys.argv[1:])
    train_and_save(quiet_trainer(root / "fit", devices=2, max_steps=1), root / "two.ckpt")
    trainer = quiet_trainer(root / "validate", devices=2)
    torch.save(evaluated_values(trainer, checkpoint), root / f"loaded-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
