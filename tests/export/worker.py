"""Saves a model from two processes: ``python -m tests.export.worker OUT``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.errors import SmartInfinityError
from tests.export.models import LitModel
from tests.helpers.trainers import quiet_trainer


def error_of(trainer: Any, folder: Path) -> str:
    """Return the error that save_pretrained raises on this rank."""
    try:
        trainer.strategy.save_pretrained(folder)
    except SmartInfinityError as error:
        return str(error)
    return ""


def failing_write(folder: Path, trainer: Any) -> str:
    """Let the first rank's third write fail."""
    from lightning_smartinfinity.errors import StorageError
    from lightning_smartinfinity.export import shards

    write, calls = shards.Shards.write, 0

    def fails(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StorageError("The third write failed.", "Write again.")
        write(*arguments)

    shards.Shards.write = fails  # type: ignore[method-assign]
    try:
        return error_of(trainer, folder)
    finally:
        shards.Shards.write = write  # type: ignore[method-assign]


def main() -> None:
    out = Path(sys.argv[1])
    module = LitModel("gpt2")
    trainer: Any = quiet_trainer(out, devices=2, max_steps=2, limit_val_batches=0)
    trainer.fit(module)
    trainer.save_checkpoint(out / "ckpt")
    trainer.strategy.save_pretrained(out / "live")
    trainer.strategy.save_pretrained(out / "live32", dtype=torch.float32)
    (out / "taken").touch()
    errors = [error_of(trainer, out / "taken"), failing_write(out / "failed", trainer)]
    torch.save(errors, out / f"errors-{module.global_rank}.pt")
    trainer.strategy.close()
    evaluated: Any = quiet_trainer(out / "evaluated", devices=2)
    evaluated.validate(LitModel("gpt2"), ckpt_path=out / "ckpt")
    evaluated.strategy.save_pretrained(out / "loaded")


if __name__ == "__main__":
    main()
