"""The parts of a Trainer's loop that a training record holds, and the moments at which it is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.integrations.trainer.checkpoint_index import CheckpointIndex, model_checkpoints
from lightning_smartinfinity.zero3.ranks.collectives import gather
from lightning_smartinfinity.zero3.untyped import ClientState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.checkpoints.save.background_saves import BackgroundSaves

__all__ = ["INDEX", "loop_state", "restore_index", "watch_steps"]

INDEX = "books"
"""Key of a checkpoint index in stored training records: a new name could not read those of earlier versions."""

_LEFT_OUT = frozenset(
    {
        "state_dict",
        "optimizer_states",
        pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
        pl.LightningModule.CHECKPOINT_HYPER_PARAMS_NAME,
        pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE,
        pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY,
        pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_NAME,
        pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE,
    }
)


def restore_index(
    trainer: pl.Trainer, index: CheckpointIndex, saves: BackgroundSaves, loop: ClientState, states: ClientState
) -> None:
    """Reset ModelCheckpoints to the complete checkpoints, and remove parts of incomplete ones. Collective.

    Args:
        trainer: The Trainer.
        index: Its ModelCheckpoints' index.
        saves: The background saves of its training.
        loop: The loop's part of a training record.
        states: The callbacks' states in that record; changed in place.
    """
    own = loop.get(INDEX, {})
    described = gather(own, None)[0]
    for callback in model_checkpoints(trainer):
        entries = described.get(callback.state_key)
        if not entries or callback.state_key not in states:
            continue
        # Rank 0 says which saves there were. Each rank has its own scores of them, unless they are reduced.
        mine = {(entry["saved"], entry["step"]): entry for entry in own.get(callback.state_key, ())}
        entries = [mine.get((entry["saved"], entry["step"]), entry) for entry in entries]
        in_progress = [entry["saved"] for entry in entries[1:]]
        for path in in_progress:
            saves.remove_interrupted(path)
        is_whole = map(all, zip(*gather([os.path.exists(path) for path in in_progress], None), strict=True))
        num_whole = 1 + sum(1 for _ in takewhile(bool, is_whole))
        states[callback.state_key] |= index.restore(callback, entries, num_whole)


def loop_state(trainer: pl.Trainer) -> ClientState:
    """Return the state of loop, callbacks and schedulers as in a checkpoint of Lightning.

    If no hook object overrides ``on_load_checkpoint``, no ``on_save_checkpoint`` is called either: it is meant for
    checkpoints, and a record is not one.
    """
    connector = trainer._checkpoint_connector
    with ExitStack() as changes:
        changes.enter_context(replaced(trainer.fit_loop, "on_save_checkpoint", dict))
        hooked = (trainer.lightning_module, *trainer.callbacks)  # type: ignore[attr-defined]
        if not any(is_overridden("on_load_checkpoint", each) for each in hooked):
            changes.enter_context(replaced(connector, "_get_lightning_module_state_dict", dict))
            for each in hooked:
                changes.enter_context(replaced(each, "on_save_checkpoint", _saves_nothing))
        checkpoint: ClientState = connector.dump_checkpoint(weights_only=False)
    return {key: value for key, value in checkpoint.items() if key not in _LEFT_OUT}


def _saves_nothing(*_: object) -> None:
    """Replace an ``on_save_checkpoint``."""


def watch_steps(trainer: pl.Trainer, note: Callable[[], None], *, before: Callable[[], None]) -> None:
    """Call ``note`` whenever the loop has finished a batch that ended with a step, its validation included.

    Args:
        trainer: Trainer whose fit is being set up.
        note: Function to call; also called if SIGTERM ends the fit at that batch, but not if it ends the validation:
            the resumed fit repeats the whole validation, and the batch unless ``before`` has made a record.
        before: Function to call before a validation that follows such a batch.
    """
    loop = trainer.fit_loop.epoch_loop
    advance_end = type(loop).on_advance_end

    def end_and_note(data_fetcher: Any) -> None:
        if not loop._should_accumulate() and not loop._skip_next_val and loop._should_check_val_fx(data_fetcher):
            before()
        try:
            advance_end(loop, data_fetcher)
        except SIGTERMException:
            if not trainer.validating:
                note_step()
            raise
        note_step()

    def note_step() -> None:
        if not loop._should_accumulate():
            note()

    loop.on_advance_end = end_and_note  # type: ignore[method-assign]
