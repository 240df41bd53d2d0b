"""Lets Lightning's ModelCheckpoint save beside the training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from lightning_smartinfinity.patches import replaced

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.checkpoints.background_saves import BackgroundSaves

__all__ = ["save_beside_training", "save_in_turn"]

_PATCHES = ("_save_checkpoint", "file_exists", "_link_checkpoint")


def save_beside_training(trainer: pl.Trainer, saves: BackgroundSaves, *, finish: Callable[[], None]) -> None:
    """Let the Trainer's ModelCheckpoints go on before their checkpoints are whole.

    They look at no checkpoint that they have saved. Whoever else saves may do so, such as a subclass with a method of
    its own, and has to wait. So do all if a logger may look at what was saved.

    If there is anything to save, the room on storage that this takes is made now. Collective.

    Args:
        trainer: The Trainer.
        saves: The saves of its training.
        finish: Waits for the saves in progress.
    """
    beside = _Beside(saves, finish)
    callbacks = [
        callback
        for callback in _model_checkpoints(trainer)
        if type(callback)._save_checkpoint is ModelCheckpoint._save_checkpoint
        and not any(map(_looks_at_checkpoints, trainer.loggers))
    ]
    for callback in _model_checkpoints(trainer):
        callback._link_checkpoint = partial(beside.link, callback)  # type: ignore[method-assign]
    for callback in callbacks:
        callback._save_checkpoint = partial(beside.save, callback)  # type: ignore[method-assign]
        callback.file_exists = partial(beside.exists, callback)  # type: ignore[method-assign]
    if any(map(_saves, callbacks)) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        saves.make_room()


def save_in_turn(trainer: pl.Trainer) -> None:
    """Reverse :func:`save_beside_training`, since the callbacks may serve another Trainer next."""
    for callback in _model_checkpoints(trainer):
        for name in _PATCHES:
            vars(callback).pop(name, None)


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _saves(callback: ModelCheckpoint) -> bool:
    return callback.save_top_k != 0 or bool(callback.save_last)


def _looks_at_checkpoints(logger: Logger) -> bool:
    """Return whether a logger may look at a checkpoint when it hears of it. Lightning's own ones look at files only."""
    return not type(logger).after_save_checkpoint.__module__.startswith("lightning.")


class _Beside:
    """Holds the methods that a ModelCheckpoint uses in place of its own."""

    def __init__(self, saves: BackgroundSaves, finish: Callable[[], None]) -> None:
        self._saves = saves
        self._finish = finish

    def __deepcopy__(self, memo: dict[int, object]) -> _Beside:
        return self  # a copy of a callback belongs to the same training

    def save(self, callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str) -> None:
        # After an error nothing would tell of a save that fails later.
        with replaced(self._saves, "wanted", sys.exc_info()[0] is None):
            type(callback)._save_checkpoint(callback, trainer, filepath)

    def exists(self, callback: ModelCheckpoint, filepath: str, trainer: pl.Trainer) -> bool:
        """Return whether a path will exist, by which ModelCheckpoint chooses names. Collective."""
        will_exist = self._saves.will_exist(filepath)
        return type(callback).file_exists(callback, filepath, trainer) if will_exist is None else will_exist

    def link(self, callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        """Link ``last.ckpt`` to a checkpoint once it is whole, on one rank for each file system."""
        self._finish()
        view: Any = SimpleNamespace(is_global_zero=self._saves.leads_at(filepath), strategy=trainer.strategy)
        type(callback)._link_checkpoint(view, filepath, linkpath)
