"""Collects what a Trainer's loop needs to go on behind a batch, and lets a restarted loop go on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_smartinfinity.patches import replaced
from lightning_smartinfinity.resume.loops import begin_epoch_after_last
from lightning_smartinfinity.zero3.untyped import ClientState

__all__ = ["go_on_after_batch", "loop_state", "restore_loop", "watch_steps"]

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


def loop_state(trainer: pl.Trainer) -> ClientState:
    """Return what a checkpoint of Lightning holds beside weights, optimizer state and hyperparameters, and metrics.

    The metrics are those that callbacks and schedulers see of what was logged so far.
    """
    connector = trainer._checkpoint_connector
    with replaced(connector, "_get_lightning_module_state_dict", dict):
        checkpoint: ClientState = connector.dump_checkpoint(weights_only=False)
    return {
        "checkpoint": {key: value for key, value in checkpoint.items() if key not in _LEFT_OUT},
        "metrics": dict(trainer.callback_metrics),
    }


def restore_loop(trainer: pl.Trainer, state: ClientState) -> ClientState:
    """Restore the metrics of a :func:`loop_state`; return what Lightning restores from a checkpoint."""
    trainer._logger_connector._callback_metrics.update(state["metrics"])
    checkpoint: ClientState = state["checkpoint"]
    return checkpoint


def watch_steps(trainer: pl.Trainer, note: Callable[[], None]) -> None:
    """Call ``note`` whenever the loop is done with a batch that ended with a step, validation included.

    Args:
        trainer: Trainer whose fit is being set up.
        note: Function that is called also if SIGTERM ends the fit then.
    """
    loop = trainer.fit_loop.epoch_loop
    advance_end = type(loop).on_advance_end

    def end_and_note(data_fetcher: Any) -> None:
        try:
            advance_end(loop, data_fetcher)
        except SIGTERMException:
            note_step()
            raise
        note_step()

    def note_step() -> None:
        if not loop._should_accumulate():
            note()

    loop.on_advance_end = end_and_note  # type: ignore[method-assign]


def go_on_after_batch(trainer: pl.Trainer) -> None:
    """Let a restarted loop go on as if it had just ended a batch, with the next batch or the end of the epoch.

    Lightning's own restart guesses what followed a batch from the progress that was saved, and would leave a validation
    out, or count a step twice.

    Args:
        trainer: Trainer whose fit is about to begin its first epoch, directly after random states have been restored.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    run_start = type(epoch_loop).on_run_start
    begin_epoch_after_last(fit_loop)

    def start_once(data_fetcher: Any) -> None:
        del epoch_loop.on_run_start  # from now on it is the class's again
        run_start(epoch_loop, data_fetcher)
        fit_loop._restarting = False
        epoch_loop.restarting = False

    epoch_loop.on_run_start = start_once  # type: ignore[method-assign]
