"""Two processes train, save, and evaluate what one process saved: ``... evaluation_worker ROOT CHECKPOINT``."""

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
    """Counts its steps in a buffer, and keeps what was loaded."""

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
    """A few steps, and a checkpoint."""
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
    """Every value of a module that was validated from a checkpoint and held only zeros before."""
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
