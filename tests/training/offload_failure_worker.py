"""Makes a parameter read fail on rank 1 of two: ``python -m tests.training.offload_failure_worker FOLDER``.

Every rank writes the error that it caught to ``rank-<n>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy
from tests.helpers import native_testing as testing
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer


class FailOnRankOne(pl.Callback):
    """A callback that makes a read on rank 1 fail."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            trainer.strategy.drain()  # type: ignore[attr-defined]  # updated parameters are on their way to storage
        if trainer.global_step == 1 and trainer.global_rank == 1:
            testing.inject(trainer.strategy._parameters.store.core, fail_read_at=2)  # type: ignore[attr-defined]


def main() -> None:
    """Train, and record the error and the files left on storage."""
    root = Path(sys.argv[1])
    zero = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
    strategy = SmartInfinityStrategy(root / "storage", zero=zero, transfer={"keep": False})
    trainer = quiet_trainer(root, strategy, devices=2, callbacks=[FailOnRankOne()])
    met = "nothing"
    try:
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed", width=64)))
    except SmartInfinityError as error:
        met = f"{type(error).__name__}: {error}"
    strategy.close()
    # In contrast to Path.rglob(), this may meet folders that the other rank removes.
    folders = [Path(folder) for folder, _, _ in os.walk(root) if folder.endswith(f"{trainer.global_rank:05d}")]
    left = [str(path) for folder in folders for path in folder.glob("*.bin")]
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps({"met": met, "left": left}))


if __name__ == "__main__":
    main()
