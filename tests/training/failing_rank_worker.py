"""Two ranks train; storage fails on rank 1 in the third step.

``python -m tests.training.failing_rank_worker FOLDER OVERLAP``

First a write of state fails, then, in a second fit, that of the commit record. Every rank writes what it met into
``rank-<n>.json``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy
from lightning_smartinfinity.native import testing
from tests.helpers.models import LitTiny, Recipe


class FailOnRankOne(pl.Callback):
    """Lets rank 1 fail once in the third step."""

    def __init__(self, fail: Callable[[Any], None]) -> None:
        self.fail = fail

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.strategy.drain()  # the step before may still be in flight
            if trainer.global_rank == 1:
                self.fail(trainer.strategy.optimizers[0])


def fail_write(optimizer: Any) -> None:
    """The next write of state fails."""
    testing.inject(optimizer.rank_state.handler._device._pipeline, fail_write_at=0)


def fail_commit(optimizer: Any) -> None:
    """The next commit record cannot be written."""
    real = os.pwrite

    def full(*_: Any) -> int:
        os.pwrite = real
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = full  # type: ignore[assignment]


def fit(root: Path, fail: Callable[[Any], None]) -> tuple[pl.Trainer, dict[str, Any]]:
    """Train and note the error, the generation and the step counts of this rank."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed",
        strategy=SmartInfinityStrategy(root / "storage", overlap=sys.argv[2]),
        max_steps=5,
        callbacks=[FailOnRankOne(fail)],
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
    return trainer, {"met": met, "generation": handler.generation, "steps": max(handler.steps.tolist())}


def main() -> None:
    """Two fits; what the second has left is saved."""
    root, seen = Path(sys.argv[1]), {}
    for fail in (fail_write, fail_commit):
        trainer, seen[fail.__name__] = fit(root, fail)
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))
    trainer.save_checkpoint(root / "rescued.ckpt")


if __name__ == "__main__":
    main()
