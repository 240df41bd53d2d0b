"""Keeps what ModelCheckpoints know of their checkpoints, so that a resumed fit knows only those that are whole.

A ModelCheckpoint writes a checkpoint into its books before it is saved. So a training record holds the books of the
last checkpoint that was whole, and behind them those of each save in progress. The record is written again before a
save begins: no checkpoint becomes whole, and none is removed for it, that the record does not know.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity.zero3.ranks.background_jobs import BackgroundJobs
from lightning_smartinfinity.zero3.untyped import ClientState

__all__ = ["CheckpointBooks", "model_checkpoints"]

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


@dataclass
class _Entry:
    """A ModelCheckpoint's books as they are right once a save is whole.

    Args:
        fields: What the callback's state holds of its checkpoints.
        path: What is saved, or a link to it.
        saved: The checkpoint saved last.
        step: Optimizer steps of the training at its save.
        has_begun: Whether the save is whole, or one of the jobs.
        num_jobs: Jobs that have to be done for these books to be right; None: all that were started.
    """

    fields: dict[str, Any]
    path: str
    saved: str
    step: int
    has_begun: bool = True
    num_jobs: int | None = None


class CheckpointBooks:
    """The books of a Trainer's ModelCheckpoints: of the last save that is whole, and of each one in progress.

    Args:
        trainer: The Trainer.
        jobs: The jobs that save and remove checkpoints.
    """

    def __init__(self, trainer: pl.Trainer, jobs: BackgroundJobs) -> None:
        self._trainer, self._jobs = trainer, jobs
        # By id: the key of a callback's state changes with its settings, which a training may change.
        self._entries = {id(one): [_present(one)] for one in model_checkpoints(trainer)}

    def begin_save(self, callback: ModelCheckpoint, path: str, *, link_to: str | None = None) -> None:
        """Note that a save begins which the callback has in its books already.

        Args:
            callback: The callback.
            path: What is saved.
            link_to: The checkpoint that it is a link to; None: it is a checkpoint.
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
        """Note that the save begun last is whole, or goes on beside the training."""
        self._entries[id(callback)][-1].has_begun = True

    def describe(self) -> ClientState:
        """Return, by the callbacks' keys, the books for a training record."""
        return {
            callback.state_key: [
                {"fields": entry.fields, "path": entry.path, "saved": entry.saved, "step": entry.step}
                for entry in self._settled(callback)
            ]
            for callback in model_checkpoints(self._trainer)
        }

    def roll_back(self) -> None:
        """Give the callbacks the books of the last save that is whole, if a later one has failed."""
        for callback in model_checkpoints(self._trainer):
            first = self._settled(callback)[0]
            if not self._is_right(first, is_last=len(self._entries[id(callback)]) == 1):
                vars(callback).update(first.fields)

    def restore(self, callback: ModelCheckpoint, described: Sequence[Mapping[str, Any]], num_whole: int) -> ClientState:
        """Let a callback go on with the newest books that are right; return the entries of its state. Collective.

        Args:
            callback: The callback.
            described: Its part of :meth:`describe`.
            num_whole: How many of these books are right, from the first on.
        """
        entries = [_Entry(**one) for one in described[:num_whole]]
        for before, after in pairwise(entries):
            if after.path != os.path.abspath(after.saved):  # the link may lead to an older checkpoint still
                callback._link_checkpoint(self._trainer, after.saved, after.path)
            for path in _outdated(callback, before.fields, after.fields):
                if os.path.lexists(path) and callback._should_remove_checkpoint(self._trainer, path, after.path):
                    callback._remove_checkpoint(self._trainer, path)
        newest = entries[-1]
        callback._last_checkpoint_saved, callback._last_global_step_saved = newest.saved, newest.step
        self._entries[id(callback)] = [newest]
        return newest.fields

    def _settled(self, callback: ModelCheckpoint) -> list[_Entry]:
        """Return the entries of a callback, without those before the newest that is right."""
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
    """Yield the checkpoints that the callback removes when its books change so."""
    kept = {*after["best_k_models"], after["best_model_path"], after["last_model_path"]}
    if callback.monitor is not None:
        yield from (path for path in before["best_k_models"] if path not in kept)
    elif callback.save_top_k == 1 and before["best_model_path"] not in ("", *kept):
        yield before["best_model_path"]
    if before["last_model_path"] not in ("", *kept):
        yield before["last_model_path"]
