"""Exports in processes of their own: ``python -m tests.export.worker DOING ARGUMENTS``.

DOING is the name of a function below, which has the arguments.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.cli import main as command
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.export import destination, shards
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.export.lightning_file import _Streams
from tests.export.models import LitModel
from tests.helpers.trainers import quiet_trainer
from tests.training.memory_worker import Wide, growth, trainer_of


def after(calls: int, function: Callable[..., Any], end: Callable[[], object]) -> Callable[..., Any]:
    """Return a function that ends in some way in place of the call after this number of calls."""
    left = iter(range(calls))

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            end()
        return function(*args, **kwargs)

    return called


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise StorageError("The third write failed.", "Write again.")


def killed(moment: str, checkpoint: str, out: str, to: str) -> None:
    """Export a checkpoint by the command, and be killed after a number of writes, or before it replaces."""
    if moment != "replacing":
        for writer in (shards.Shards, _Streams):
            writer.write = after(int(moment), writer.write, kill)  # type: ignore[method-assign]
    else:
        destination.put_in_place = after(0, destination.put_in_place, kill)  # type: ignore[attr-defined]
    sys.exit(command(["export", checkpoint, out, "--to", to]))


def memory(folder: str, depth: str) -> None:
    """Measure memory while a model of this depth is exported."""
    root = Path(folder)
    trainer: Any = trainer_of(folder, steps=1)
    trainer.fit(Wide(int(depth)))
    figures = {
        "live": growth(lambda: trainer.strategy.save_pretrained(root / "live")),
        "live_masters": growth(lambda: trainer.strategy.save_pretrained(root / "masters", dtype=torch.float32)),
    }
    trainer.save_checkpoint(root / "ckpt")
    trainer.strategy.close()
    for to in ("safetensors", "lightning"):
        settings = ExportSettings(to=to)
        figures[to] = growth(lambda s=settings: export_checkpoint(root / "ckpt", root / f"out-{s.to}", s))
    figures["parameters"] = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.lightning_module.parameters())
    sys.stdout.write(f"FIGURES {json.dumps(figures)}\n")


def two(folder: str) -> None:
    """Save a model from two processes, of which one cannot write in the end, and one that is only evaluated."""
    out, module = Path(folder), LitModel("gpt2")
    trainer: Any = quiet_trainer(out, devices=2, max_steps=2, limit_val_batches=0)
    trainer.fit(module)
    trainer.save_checkpoint(out / "ckpt")
    trainer.strategy.save_pretrained(out / "live")
    trainer.strategy.save_pretrained(out / "live32", dtype=torch.float32)
    (out / "taken").touch()
    errors, write = [error_of(trainer, out / "taken")], shards.Shards.write
    shards.Shards.write = after(2, write, fail)  # type: ignore[method-assign]
    errors.append(error_of(trainer, out / "failed"))
    shards.Shards.write = write  # type: ignore[method-assign]
    torch.save(errors, out / f"errors-{module.global_rank}.pt")
    trainer.strategy.close()
    evaluated: Any = quiet_trainer(out / "evaluated", devices=2)
    evaluated.validate(LitModel("gpt2"), ckpt_path=out / "ckpt")
    evaluated.strategy.save_pretrained(out / "loaded")


def error_of(trainer: Any, folder: Path) -> str:
    """Return the error that save_pretrained raises on this rank."""
    try:
        trainer.strategy.save_pretrained(folder)
    except SmartInfinityError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
