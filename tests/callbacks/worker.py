"""Trains with the monitor in processes of their own: ``python -m tests.callbacks.worker OUT DEVICES [CKPT]``.

Every rank writes what it saw to ``OUT/rank-<rank>.json``, next to the logger's files and a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module


def launch(out: Path, *, devices: int = 1, resume: Path | None = None) -> list[dict[str, Any]]:
    """Train in fresh processes and return what each rank saw."""
    arguments = [str(out), str(devices), *([str(resume)] if resume else [])]
    done = run_module("tests.callbacks.worker", *arguments, ranks=devices)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(devices)]


class Witness(pl.Callback):
    """A callback that records this rank's counters, and the collectives with the shape of the metrics."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"gathers": 0}
        self._all_gather = dist.all_gather

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from lightning_smartinfinity.integrations.trainer import metrics

        shape = metrics.StorageCounters().counters.shape

        def counting(tensors: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen["gathers"] += tensor.shape == shape
            return self._all_gather(tensors, tensor, *args, **kwargs)

        dist.all_gather = counting

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.seen["traffic"] = dataclasses.asdict(strategy.traffic())
        self.seen["state_numel"] = strategy.state_numel


def main() -> None:
    from lightning_smartinfinity import SmartInfinityStrategy, StorageTrafficMonitor

    out, devices, resume = Path(sys.argv[1]), int(sys.argv[2]), [*sys.argv[3:], None][0]
    monitor, witness = StorageTrafficMonitor(), Witness()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=SmartInfinityStrategy(out / "storage", overlap="none"),  # a measurement has all bytes of its steps
        precision="bf16-mixed",
        max_steps=12 if resume else 6,
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        val_check_interval=4,
        limit_val_batches=1,
        callbacks=[witness, monitor],
        logger=CSVLogger(out, name="logs", version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    recipe = Recipe(precision="bf16-mixed", accumulate=2)
    trainer.fit(LitTiny(recipe), recipe.loader(), recipe.loader(), ckpt_path=resume)
    trainer.save_checkpoint(out / "saved.ckpt")
    witness.seen |= {"summary": monitor.summary}
    (out / f"rank-{trainer.global_rank}.json").write_text(json.dumps(witness.seen))


if __name__ == "__main__":
    main()
