"""Predicts, fits and predicts again on two processes: ``python -m tests.training.predict_worker ROOT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from tests.helpers.plain import Everything
from tests.helpers.trainers import quiet_trainer


class SameOnEveryRank(Everything):
    """A module that trains every rank on the first batch, so that the weights do not depend on the number of ranks."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(self.recipe.batch(0))  # type: ignore[no-any-return]


def predict_around_a_fit(trainer: pl.Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's predictions before and after a fit."""
    module = SameOnEveryRank()
    before = torch.cat(trainer.predict(module))  # type: ignore[arg-type]
    trainer.fit(module)
    return before, torch.cat(trainer.predict(module))  # type: ignore[arg-type]


def main() -> None:
    root = Path(sys.argv[1])
    trainer = quiet_trainer(root / "two", devices=2, precision="32-true", max_steps=1)
    predicted = [values.tolist() for values in predict_around_a_fit(trainer)]
    (root / f"predicted-{trainer.global_rank}.json").write_text(json.dumps(predicted))


if __name__ == "__main__":
    main()
