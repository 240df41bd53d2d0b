"""Saves over a checkpoint, and fails: ``python -m tests.training.failed_save_worker FOLDER DEVICES [MOMENT]``.

The ranks save to ``last.ckpt`` after the first step, and copy that to ``first.ckpt``. MOMENT names the moment at which
one rank kills itself in the save after the second step. Without it, the saves after the training fail on rank 0: the
disk is full when the last files are written, or another process saves there. Every rank writes the errors that it
caught, and whether the old checkpoint is as it was, to ``rank-<n>.json``, and then saves once more.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.runtime.engine
import torch.distributed as dist

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy, TopK
from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.storage.folders import staging_folder
from lightning_smartinfinity.zero3.checkpoints.formats import tensor_file
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit
from tests.stock.systems import Hook
from tests.training.asynchronous_worker import contents

RECIPE = Recipe(precision="bf16-mixed", max_steps=4)
CODEC = TopK(0.05)
TRANSFER = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}


def die_before(owner: Any, name: str, *, rank: int, count: int = 0) -> None:
    """Kill the process of this rank at a call of a function, after ``count`` calls that return."""
    call: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(count))

    def dying(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank and next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, dying)


MOMENTS: dict[str, Callable[[int], None]] = {
    "writing": lambda devices: die_before(tensor_file.TensorStream, "write", rank=devices - 1, count=4),
    "removing": lambda devices: die_before(staging_folder, "_remove_tree", rank=0),
}


def full_at(name: str) -> AbstractContextManager[object]:
    """Let a disk be full when the file of this name is written."""
    write = Path.write_text

    def refused(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **kwargs)

    return mock.patch.object(Path, "write_text", refused)


SCRIPT = "zero_to_fp32.py"
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), SCRIPT)
FAULTS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    SCRIPT: lambda _: mock.patch.object(deepspeed.runtime.engine, "copyfile", side_effect=NO_SPACE),
    "latest": lambda _: full_at("latest"),
    NOTE_NAME: lambda _: full_at(NOTE_NAME),
    "another process": lambda path: staging_folder.locked(path / ".saving", path),
}


def save_with_faults(trainer: Any, path: Path) -> dict[str, Any]:
    """Save with each fault on rank 0; return what this rank met, and whether the checkpoint is as it was."""
    before, seen = contents(path), dict[str, Any]()
    for name, fault in FAULTS.items():
        trainer.strategy.barrier()
        with fault(path) if trainer.global_rank == 0 else nullcontext():
            trainer.strategy.barrier()
            met = "nothing"
            try:
                trainer.save_checkpoint(path)
            except SmartInfinityError as error:
                met = f"{type(error).__name__}: {error}"
            trainer.strategy.barrier()
        trainer.strategy.barrier()
        seen[name] = {"met": met, "same": contents(path) == before}
    trainer.strategy.barrier()
    trainer.save_checkpoint(path)
    return seen


def main() -> None:
    folder, devices, moment = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    path = folder / "last.ckpt"

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            shutil.copytree(path, folder / "first.ckpt")

    def save_and_die(trainer: Any) -> None:
        MOMENTS[moment[0]](devices)
        trainer.save_checkpoint(path)

    strategy = SmartInfinityStrategy(folder / "storage", compression=CODEC, transfer=TRANSFER)
    hooks = [Hook(1, save), *(Hook(2, save_and_die) for _ in moment)]
    trainer = fit(LitTiny(RECIPE), folder, strategy, devices=devices, max_steps=RECIPE.max_steps, callbacks=hooks)
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(save_with_faults(trainer, path)))


if __name__ == "__main__":
    main()
