"""Saves beside training, on one rank and on two."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy, TransferConfig
from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorStream
from lightning_smartinfinity.zero3.checkpoints.save.background_saves import BackgroundSaves
from lightning_smartinfinity.zero3.ranks.background_jobs import BackgroundJobs
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import await_that
from tests.stock.systems import Hook

TRANSFER = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
SAVE_AT, NUM_STEPS = 2, 9


def saves_of(trainer: pl.Trainer) -> BackgroundSaves:
    strategy: Any = trainer.strategy
    return strategy._training_engine.saves  # type: ignore[no-any-return]


def save_beside(trainer: pl.Trainer, path: Path, *, weights_only: bool = False) -> None:
    """Save as a ModelCheckpoint does."""
    with replaced(saves_of(trainer), "wanted", True):
        trainer.save_checkpoint(path, weights_only)


class Turns(pl.Callback):
    """Lets a save write one window in each step, so that every step of the training comes between two windows.

    Attributes:
        num_windows: Windows that were written before the fit's end.
    """

    def __init__(self) -> None:
        self._num_begun = 0
        self._is_over = False
        self.num_windows = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._num_begun += 1

    def on_train_end(self, *_: Any) -> None:
        self._is_over = True

    def pause(self, jobs: BackgroundJobs, seconds: float) -> None:
        before = self._num_begun
        self.num_windows += not self._is_over
        await_that(lambda: self._num_begun > before or self._is_over or jobs._is_awaited.is_set())

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let all saves pause so."""
        with mock.patch.object(BackgroundJobs, "pause", lambda jobs, seconds: self.pause(jobs, seconds)):
            yield


def save_twice(root: Path, *, weights_only: bool = False) -> Hook:
    """Return a callback that saves one step twice, first so that training waits, and then beside it.

    Args:
        root: The checkpoints are ``waited`` and ``beside`` there.
        weights_only: What the Trainer is told.
    """

    def save(trainer: pl.Trainer) -> None:
        with one_name():
            trainer.save_checkpoint(root / "waited", weights_only)
            save_beside(trainer, root / "beside", weights_only=weights_only)

    return Hook(SAVE_AT, save)


@contextmanager
def one_name() -> Iterator[None]:
    """Give all saves the same name, by which their files differ."""
    with mock.patch.object(folder_swap.uuid, "uuid4", return_value=uuid.UUID(int=1)):
        yield


def train(root: Path, *callbacks: pl.Callback, devices: int = 1, **settings: Any) -> list[float]:
    """Train, save the end to ``end``, and return the losses."""
    recipe = Recipe(max_steps=NUM_STEPS, **settings.pop("recipe", {}))
    transfer = TransferConfig(**{**TRANSFER, **settings.pop("transfer", {})})
    trainer_settings = {"accumulate_grad_batches": recipe.accumulate, **settings.pop("trainer", {})}
    folders = [root / f"storage{number}" for number in range(settings.pop("folders", 1))]
    strategy = SmartInfinityStrategy(folders, transfer=transfer, **settings)
    module = LitTiny(recipe)
    trainer = quiet_trainer(
        root,
        strategy,
        devices=devices,
        max_steps=NUM_STEPS,
        callbacks=list(callbacks),
        precision=recipe.precision,
        **trainer_settings,
    )
    trainer.fit(module)
    with one_name():
        trainer.save_checkpoint(root / "end")
    return module.losses


def contents(folder: Path, *, saved_to: Path | None = None) -> dict[str, bytes]:
    """Return the files of a checkpoint, without the path that it was saved to, which one of them names."""
    path = str(saved_to or folder).encode()
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes().replace(path, b"") for file in files}


def fail_on_second_rank(root: Path) -> dict[str, Any]:
    """Save beside training while the disk of the second rank is full; return what ended the fit.

    `before` has the files that the path held before. They are compared once all processes have ended,
    since one process may still remove what the failed save has left when another's fit has ended.
    """
    write, saw = TensorStream.write, dict[str, Any]()

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(root / "c.ckpt")
        saw["before"] = contents(root / "c.ckpt")

    def note(trainer: pl.Trainer, *_: Any) -> None:
        saw["step"] = trainer.global_step
        jobs: Any = trainer.strategy.optimizers[0].rank_state.background._jobs
        await_that(lambda: all(job.is_done or job.failure for job in jobs))

    saves = [Hook(1, save), Hook(SAVE_AT, lambda trainer: save_beside(trainer, root / "c.ckpt"))]

    def full(stream: TensorStream, values: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and rank == 1:
            raise OSError(28, "No space left on device")
        write(stream, values)

    rank = int(os.environ.get("RANK", "0"))
    with mock.patch.object(TensorStream, "write", full):
        try:
            train(root, *saves, LambdaCallback(on_train_batch_end=note), devices=2)
        except SmartInfinityError as error:
            saw["error"] = f"{type(error).__name__}: {error}"
    return saw


def save_on_two(root: Path) -> int:
    """Save twice on two ranks; return how many windows were written beside the training."""
    turns = Turns()
    with turns.taken():
        train(root, turns, save_twice(root), devices=2)
    return turns.num_windows
