"""Two ranks train; storage fails on rank 1 in the third step.

``python -m tests.training.failing_rank_worker FOLDER OVERLAP``

Every rank writes what it met into ``rank-<n>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy
from lightning_smartinfinity.native import testing
from tests.helpers.models import LitTiny, Recipe


class FailOnRankOne(pl.Callback):
    """Makes the next write of rank 1 fail."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            handler = trainer.strategy.optimizers[0].rank_state.handler
            handler.drain()  # the step before may still be in flight
            testing.inject(handler._device._pipeline, fail_write_at=0)


def main() -> None:
    """Train and note the error, the generation and the step counts of this rank."""
    root = Path(sys.argv[1])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed",
        strategy=SmartInfinityStrategy(root / "storage", overlap=sys.argv[2]),
        max_steps=5,
        callbacks=[FailOnRankOne()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    met = "nothing"
    try:
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))
    except SmartInfinityError as error:
        met = f"{type(error).__name__}: {error}"
    handler = trainer.strategy.optimizers[0].handler
    seen = {"met": met, "generation": handler.generation, "steps": max(handler.steps.tolist())}
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
