"""Makes Lightning's ModelCheckpoint save in the background, while training continues."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.integrations.trainer.checkpoint_index import CheckpointIndex, model_checkpoints
from lightning_smartinfinity.settings.strategy import check_save_path
from lightning_smartinfinity.storage.io.deadlines import in_time
from lightning_smartinfinity.storage.io.files import bounded

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.checkpoints.save.background_saves import BackgroundSaves

__all__ = ["check_folders", "save_after_errors_together", "save_beside_training", "save_in_turn"]

_PATCHES = ("_save_checkpoint", "file_exists", "_link_checkpoint", "_should_skip_saving_checkpoint", "on_exception")


def check_folders(trainer: pl.Trainer) -> None:
    """Check the folders of the Trainer's ModelCheckpoints, after Lightning has chosen them.

    Raises:
        CheckpointError: A folder is a URL, for which Lightning would make a local folder of that name.
    """
    if trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        for callback in filter(_saves, model_checkpoints(trainer)):
            if callback.dirpath is not None:
                check_save_path(callback.dirpath)


def save_after_errors_together(trainer: pl.Trainer) -> None:
    """Make the Trainer's ModelCheckpoints with ``save_on_exception`` save only where the strategy allows it."""
    for callback in model_checkpoints(trainer):
        callback.on_exception = partial(_save_after_error, callback)  # type: ignore[method-assign]


def _save_after_error(
    callback: ModelCheckpoint, trainer: Any, module: pl.LightningModule, error: BaseException
) -> None:
    if not callback.save_on_exception or trainer.strategy.may_save():
        type(callback).on_exception(callback, trainer, module, error)


def save_beside_training(
    trainer: pl.Trainer,
    saves: BackgroundSaves,
    index: CheckpointIndex,
    *,
    finish: Callable[[], None],
    record: Callable[[], None],
) -> None:
    """Make the Trainer's ModelCheckpoints save in the background. Collective.

    Training continues before a checkpoint is complete if neither the callback nor a logger reads the saved checkpoint.
    A subclass with a ``_save_checkpoint`` of its own may read it, so its saves finish first. The same holds for all
    callbacks if a logger may read checkpoints.

    If a callback will save, the space on storage that background saves need is reserved now.

    Args:
        trainer: The Trainer.
        saves: The background saves of the Trainer's training.
        index: Records each callback's saves.
        finish: Waits for the saves in progress.
        record: Writes the index into the training record.
    """
    beside = _Beside(saves, index, finish, record)
    callbacks = [
        callback
        for callback in model_checkpoints(trainer)
        if type(callback)._save_checkpoint is ModelCheckpoint._save_checkpoint
        and not any(map(_looks_at_checkpoints, trainer.loggers))
    ]
    for callback in model_checkpoints(trainer):
        callback._link_checkpoint = partial(beside.link, callback)  # type: ignore[method-assign]
        callback._should_skip_saving_checkpoint = partial(beside.skips, callback)  # type: ignore[method-assign]
        goes_on = any(callback is one for one in callbacks)  # a subclass may define ==
        callback._save_checkpoint = partial(beside.save, callback, may_go_on=goes_on)  # type: ignore[method-assign]
    for callback in callbacks:
        callback.file_exists = partial(beside.exists, callback)  # type: ignore[method-assign]
    if any(map(_saves, callbacks)) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        saves.make_room()


def save_in_turn(trainer: pl.Trainer) -> None:
    """Undo what the two functions above have changed, since the callbacks may serve another Trainer next."""
    for callback in model_checkpoints(trainer):
        for name in _PATCHES:
            vars(callback).pop(name, None)


def _saves(callback: ModelCheckpoint) -> bool:
    return callback.save_top_k != 0 or bool(callback.save_last)


def _looks_at_checkpoints(logger: Logger) -> bool:
    """Return whether a logger may read a saved checkpoint. Lightning's own loggers skip folders, as ours are."""
    # Checks where the method is defined: a logger that delegates calls has the method of another class.
    return not logger.after_save_checkpoint.__module__.startswith("lightning.")


class _Beside:
    """Methods that replace a ModelCheckpoint's own."""

    def __init__(
        self, saves: BackgroundSaves, index: CheckpointIndex, finish: Callable[[], None], record: Callable[[], None]
    ) -> None:
        self._saves = saves
        self._index = index
        self._finish = finish
        self._record = record

    def __deepcopy__(self, memo: dict[int, object]) -> _Beside:
        return self  # a copy of a callback belongs to the same training

    def save(self, callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str, *, may_go_on: bool) -> None:
        """Save a checkpoint; training continues meanwhile if ``may_go_on`` is set and no error is ending the fit."""
        fails = sys.exc_info()[0] is not None  # nothing would report a background save that fails later
        with self._noted(callback, filepath, fails=fails), replaced(self._saves, "wanted", may_go_on and not fails):
            type(callback)._save_checkpoint(callback, trainer, filepath)

    @contextmanager
    def _noted(
        self, callback: ModelCheckpoint, path: str, *, fails: bool, link_to: str | None = None
    ) -> Iterator[None]:
        """Record a save in the training record, unless an error is ending the fit: then no record is written."""
        if fails:
            yield
            return
        self._index.begin_save(callback, path, link_to=link_to)
        self._record()
        yield
        self._index.end_save(callback)

    def skips(self, callback: ModelCheckpoint, trainer: pl.Trainer) -> bool:
        """Return whether nothing is to be saved now; what was saved before a kill is not saved again."""
        return self._index.is_behind(callback) or type(callback)._should_skip_saving_checkpoint(callback, trainer)

    def exists(self, callback: ModelCheckpoint, filepath: str, trainer: pl.Trainer) -> bool:
        """Return whether a path will exist after all saves; ModelCheckpoint chooses file names by it. Collective."""
        will_exist = self._saves.will_exist(filepath)
        if will_exist is not None:
            return will_exist
        limited = SimpleNamespace(exists=bounded("Looking at")(callback._fs.exists))
        with replaced(callback, "_fs", limited):
            return type(callback).file_exists(callback, filepath, trainer)

    def link(self, callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        """Link ``last.ckpt`` to a checkpoint after it is complete, on one rank per file system."""
        self._finish()
        alone = SimpleNamespace(barrier=lambda: None)  # ranks meet below, outside the limit
        view: Any = SimpleNamespace(is_global_zero=self._saves.leads_at(filepath), strategy=alone)
        fails = sys.exc_info()[0] is not None
        with self._noted(callback, linkpath, fails=fails, link_to=filepath):
            link = partial(type(callback)._link_checkpoint, view, filepath, linkpath)
            in_time(link, doing="Linking", path=Path(linkpath))
            trainer.strategy.barrier()
