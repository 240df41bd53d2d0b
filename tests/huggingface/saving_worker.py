"""Saves a checkpoint as one rank of transformers' Trainer: ``python -m tests.huggingface.saving_worker FOLDER``.

It does without a model: on CPUs accelerate and DeepSpeed train in one process only. Rank 1 is late to save its random
states: it waits for rank 0 to remove older checkpoints, and gives up after some seconds. ``FOLDER/seen.json`` holds
what was flushed when rank 0 did so.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from transformers import trainer as trainer_module

from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.helpers.waiting import await_that, lenient


def recording(flush: Callable[[int], None], folder: Path, rank: int) -> Callable[[int], None]:
    """Return an ``os.fsync`` that leaves a file with the rank and the name of each file that was flushed."""

    def flushing(descriptor: int) -> None:
        flush(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        (folder / f"flushed-{rank}-{path.name}").write_text(str(path.stat().st_size))

    return flushing


def late(save: Callable[..., None], rotated: Path) -> Callable[..., None]:
    """Return a ``torch.save`` that lets rank 0 go first if it can."""

    def saving(*args: Any) -> None:
        with suppress(AssertionError):
            await_that(rotated.exists, seconds=lenient(2.0))
        save(*args)

    return saving


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    del os.environ["WORLD_SIZE"]  # which SmartInfinityTraining refuses

    def rotate(*_: object, **__: object) -> None:
        found = {file.name: file.read_text() for file in folder.glob("flushed-?-rng_state_?.pth")}
        whole = {file.name: str(file.stat().st_size) for file in (folder / "checkpoint-7").glob("rng_state_*")}
        (folder / "seen.json").write_text(json.dumps([found, whole]))

    trainer = mock.MagicMock(hp_search_backend=None)
    trainer.args.save_only_model = trainer.args.push_to_hub = False
    trainer.args.world_size, trainer.args.process_index, trainer.args.should_save = 2, rank, rank == 0
    trainer._get_output_dir.return_value, trainer.state.global_step = str(folder), 7
    trainer.state.best_global_step = None
    with (
        mock.patch.object(trainer_module, "rotate_checkpoints", rotate),
        mock.patch.object(os, "fsync", recording(os.fsync, folder, rank)),
        mock.patch.object(torch, "save", late(torch.save, folder / "seen.json") if rank else torch.save),
        SmartInfinityTraining(storage=folder / "storage"),
    ):
        trainer._save_rng_state = partial(transformers.Trainer._save_rng_state, trainer)
        transformers.Trainer._save_checkpoint(trainer, mock.MagicMock(), None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
