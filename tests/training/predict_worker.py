"""Predicts, fits and predicts again on two processes: ``python -m tests.training.predict_worker ROOT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.helpers.plain import RECIPE, Everything
from tests.helpers.trainers import quiet_trainer


class SameOnEveryRank(Everything):
    """A module that trains every rank on the first batch, so that the weights do not depend on the number of ranks."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(self.recipe.batch(0))  # type: ignore[no-any-return]


class WithoutParameters(pl.LightningModule):
    """A module that computes its loss from the data alone, like a baseline to compare with."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", batch.float().mean())

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return 2 * batch

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return RECIPE.validation_loader()

    predict_dataloader = val_dataloader


def predict_around_a_fit(trainer: pl.Trainer) -> list[torch.Tensor]:
    """Return this rank's predictions before and after a fit, and those of a module without parameters."""

    def predict(module: pl.LightningModule) -> torch.Tensor:
        return torch.cat(trainer.predict(module))  # type: ignore[arg-type]

    module = SameOnEveryRank()
    before = predict(module)
    trainer.fit(module)
    return [before, predict(module), predict(WithoutParameters())]


def main() -> None:
    root = Path(sys.argv[1])
    trainer = quiet_trainer(root / "two", devices=2, precision="32-true", max_steps=1)
    predicted = [values.tolist() for values in predict_around_a_fit(trainer)]
    (root / f"predicted-{trainer.global_rank}.json").write_text(json.dumps(predicted))


if __name__ == "__main__":
    main()
