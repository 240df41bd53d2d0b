"""Records the ModelCheckpoints' own lists of checkpoints, so that a resumed fit lists only complete checkpoints.

A ModelCheckpoint adds a checkpoint to its fields (``best_k_models``, ``last_model_path``, ...) before it is saved. Such
a set of fields is called the callback's index here. A training record holds the index as of the last complete
checkpoint, followed by the index of each save in progress. The record is rewritten before a save begins, so that it
already lists every checkpoint that completes, and every removal that follows.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.zero3.ranks.background_jobs import BackgroundJobs
from lightning_smartinfinity.zero3.untyped import ClientState

__all__ = [
    "CheckpointIndex",
    "checkpoints_of",
    "folders_of",
    "model_checkpoints",
    "require_no_lost_link",
    "warn_of_moving_folders",
]

_SAVED_ON_SLURM = "hpc_ckpt_"  # names of what Lightning saves in default_root_dir when SLURM requeues the job
_FIELDS = (
    "best_model_score",
    "best_model_path",
    "current_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)


def model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    """Return the Trainer's ModelCheckpoints."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def checkpoints_of(trainer: pl.Trainer) -> list[str]:
    """Return the checkpoints that ``fit(ckpt_path="last")`` may choose from, the others in their folders, and SLURM's.

    Raises:
        StorageError: A folder cannot be read.
    """
    named = _named_by(trainer)
    return list({os.path.realpath(path): path for path in sorted(named) if os.path.exists(path)}.values())


def require_no_lost_link(trainer: pl.Trainer) -> None:
    """Check that no link names a checkpoint that is gone, as with ``save_last="link"``, before a fit begins anew.

    Raises:
        CheckpointError: There is such a link.
        StorageError: A folder cannot be read.
    """
    for path in _named_by(trainer):
        if os.path.islink(path) and not os.path.exists(path):
            raise CheckpointError(
                f"{path} is a link to the checkpoint {os.readlink(path)!r}, which is gone, and there is nothing else "
                "to resume from.",
                "Put the checkpoint back, or remove the link to begin at step 0.",
            )


def folders_of(trainer: pl.Trainer) -> list[str]:
    """Return the folders of the Trainer's ModelCheckpoints."""
    return list(dict.fromkeys(str(one.dirpath) for one in model_checkpoints(trainer) if one.dirpath is not None))


def warn_of_moving_folders(trainer: pl.Trainer) -> None:
    """Warn if a logger has named a ModelCheckpoint's folder: for the next start it may name another one."""
    versions = (str(logger.version) for logger in trainer.loggers[:1] if logger.version is not None)
    names = {name for version in versions for name in (version, f"version_{version}")}
    for folder in folders_of(trainer):
        if not names.isdisjoint(Path(folder).parts) and not os.path.exists(folder):
            rank_zero_warn(
                f"The logger names the folder of checkpoints, {folder}. If it names another one for each start, no "
                "start finds the checkpoints of those before. Pass ModelCheckpoint(dirpath=...)."
            )


def _named_by(trainer: pl.Trainer) -> list[str]:
    """Return the paths that may be checkpoints of the Trainer, also those of links to nothing."""
    named = []
    for callback in model_checkpoints(trainer):
        if callback.dirpath is not None:
            templates = (callback.filename or "", callback.CHECKPOINT_NAME_LAST)
            # A name with "/", such as that of a metric "train/loss", makes folders within the callback's folder.
            depth = max(name.count("/") for name in templates)
            named += _checkpoints_in(str(callback.dirpath), suffix=callback.FILE_EXTENSION, depth=depth)
    in_root = _checkpoints_in(trainer.default_root_dir, suffix=ModelCheckpoint.FILE_EXTENSION, depth=0)
    named += [path for path in in_root if os.path.basename(path).startswith(_SAVED_ON_SLURM)]
    return named + [one.ckpt_path for one in vars(trainer)["callbacks"] if isinstance(one, OnExceptionCheckpoint)]


def _checkpoints_in(folder: str, *, suffix: str, depth: int) -> list[str]:
    """Return the checkpoints in a folder and in folders within it, down to a depth; 0: in the folder alone."""
    found = []
    with storage_errors("Looking for checkpoints in", folder), suppress(FileNotFoundError):
        # A name that begins with a dot is that of a save in progress.
        for path in (os.path.join(folder, name) for name in os.listdir(folder) if not name.startswith(".")):
            if path.endswith(suffix):
                found.append(path)
            elif depth > 0 and os.path.isdir(path):
                found += _checkpoints_in(path, suffix=suffix, depth=depth - 1)
    return found


@dataclass
class _Entry:
    """The index of a ModelCheckpoint as it is valid once a save is complete.

    Args:
        fields: The fields of the callback's state that describe its checkpoints.
        path: Path of the checkpoint or link that is being saved.
        saved: Path of the checkpoint itself; the link's target if ``path`` is a link.
        step: Optimizer steps of the training at the save.
        has_begun: Whether the save is complete, or runs as a background job.
        num_jobs: Number of jobs that must be done before this index is valid; None: all jobs started so far.
    """

    fields: dict[str, Any]
    path: str
    saved: str
    step: int
    has_begun: bool = True
    num_jobs: int | None = None


class CheckpointIndex:
    """The index of a Trainer's ModelCheckpoints: that of the last complete save, and of each save in progress.

    Args:
        trainer: The Trainer.
        jobs: The background jobs that save and remove checkpoints.
    """

    def __init__(self, trainer: pl.Trainer, jobs: BackgroundJobs) -> None:
        self._trainer, self._jobs = trainer, jobs
        # Keyed by id: a callback's state_key changes with its settings, which may change during training.
        self._entries = {id(one): [_present(one)] for one in model_checkpoints(trainer)}
        self._restored: dict[int, int] = {}  # steps of the newest complete checkpoints when the fit resumed

    def begin_save(self, callback: ModelCheckpoint, path: str, *, link_to: str | None = None) -> None:
        """Record the start of a save that the callback has already added to its index.

        Args:
            callback: The callback.
            path: Path of the checkpoint or link.
            link_to: The link's target; None if ``path`` is a checkpoint.
        """
        entries = self._settled(callback)
        entries[-1].num_jobs = self._jobs.num_started
        entries.append(
            _Entry(
                fields=_fields_of(callback),
                path=os.path.abspath(path),
                saved=path if link_to is None else link_to,
                step=self._trainer.global_step,
                has_begun=False,
            )
        )

    def end_save(self, callback: ModelCheckpoint) -> None:
        """Record that the save begun last is complete, or continues in the background."""
        self._entries[id(callback)][-1].has_begun = True

    def describe(self) -> ClientState:
        """Return the index for a training record, by the callbacks' keys."""
        return {
            callback.state_key: [
                {"fields": entry.fields, "path": entry.path, "saved": entry.saved, "step": entry.step}
                for entry in self._settled(callback)
            ]
            for callback in model_checkpoints(self._trainer)
        }

    def roll_back(self) -> None:
        """Reset the callbacks to the index of the last complete save, if a later save has failed."""
        for callback in model_checkpoints(self._trainer):
            first = self._settled(callback)[0]
            if not self._is_right(first, is_last=len(self._entries[id(callback)]) == 1):
                vars(callback).update(first.fields)

    def restore(self, callback: ModelCheckpoint, described: Sequence[Mapping[str, Any]], num_whole: int) -> ClientState:
        """Reset a callback to its newest valid index; return the fields of its state. Collective.

        Args:
            callback: The callback.
            described: The callback's part of :meth:`describe`.
            num_whole: Number of valid entries, counted from the first.
        """
        entries = [_Entry(**one) for one in described[:num_whole]]
        for before, after in pairwise(entries):
            if after.path != os.path.abspath(after.saved):  # the link may still point to an older checkpoint
                callback._link_checkpoint(self._trainer, after.saved, after.path)
            for path in _outdated(callback, before.fields, after.fields):
                if os.path.lexists(path) and callback._should_remove_checkpoint(self._trainer, path, after.path):
                    callback._remove_checkpoint(self._trainer, path)
        newest = entries[-1]
        callback._last_checkpoint_saved, callback._last_global_step_saved = newest.saved, newest.step
        self._entries[id(callback)], self._restored[id(callback)] = [newest], newest.step
        return newest.fields

    def is_behind(self, callback: ModelCheckpoint) -> bool:
        """Return whether the fit resumed with a complete checkpoint of the present step or a later one."""
        return self._trainer.global_step <= self._restored.get(id(callback), -1)

    def _settled(self, callback: ModelCheckpoint) -> list[_Entry]:
        """Drop a callback's entries older than the newest valid one, and return the rest."""
        entries = self._entries[id(callback)]
        while len(entries) > 1 and self._is_right(entries[1], is_last=len(entries) == 2):
            del entries[0]
        return entries

    def _is_right(self, entry: _Entry, *, is_last: bool) -> bool:
        needed = self._jobs.num_started if is_last or entry.num_jobs is None else entry.num_jobs
        return entry.has_begun and self._jobs.num_done >= needed


def _present(callback: ModelCheckpoint) -> _Entry:
    saved = callback._last_checkpoint_saved
    return _Entry(fields=_fields_of(callback), path=saved, saved=saved, step=callback._last_global_step_saved)


def _fields_of(callback: ModelCheckpoint) -> dict[str, Any]:
    return {name: copy.deepcopy(getattr(callback, name)) for name in _FIELDS}


def _outdated(callback: ModelCheckpoint, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the checkpoints that the callback removes when its index changes from ``before`` to ``after``."""
    kept = {*after["best_k_models"], after["best_model_path"], after["last_model_path"]}
    if callback.monitor is not None:
        yield from (path for path in before["best_k_models"] if path not in kept)
    elif callback.save_top_k == 1 and before["best_model_path"] not in ("", *kept):
        yield before["best_model_path"]
    if before["last_model_path"] not in ("", *kept):
        yield before["last_model_path"]
