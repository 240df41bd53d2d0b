"""The point of a fit at which a checkpoint was saved, and the point at which the resumed fit continues.

A checkpoint may be saved in any hook. Lightning's own restart infers from the saved progress what follows, and leaves
out a validation that was due, an epoch's hooks, or the rest of an epoch that ``max_steps`` ended. So the checkpoint
holds what follows, as a :class:`Following`, and :func:`settle` changes the saved progress accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = ["Following", "following", "is_at_end", "is_between_steps", "is_within_step", "settle"]


class Following(Enum):
    """What a fit does next."""

    EPOCH = "epoch"
    """It begins an epoch."""
    BATCH = "batch"
    """It fetches the next batch of the epoch, or repeats the batch within which it was saved."""
    BATCH_END = "batch end"
    """It ends a batch: with a validation, if one is due."""
    VALIDATION_END = "validation end"
    """It ends a batch whose validation has run."""


def following(fit_loop: Any, *, is_ending_batch: bool) -> Following:
    """Return what a fit loop does next.

    Args:
        fit_loop: Fit loop of a Trainer, in any hook or after the fit.
        is_ending_batch: Whether the loop is at the end of a batch, where it validates.
    """
    epoch, batch = fit_loop.epoch_progress.current, fit_loop.epoch_loop.batch_progress.current
    has_begun = 0 < epoch.ready == epoch.started
    if not has_begun or (epoch.processed == epoch.ready and fit_loop.epoch_loop._num_ready_batches_reached()):
        return Following.EPOCH
    if epoch.processed == epoch.ready:  # max_steps or a callback has ended the fit within the epoch
        return Following.BATCH
    if batch.ready == batch.processed > batch.completed:
        return Following.BATCH_END
    if not is_ending_batch:
        return Following.BATCH
    validation = fit_loop.epoch_loop.val_loop
    progress = validation.batch_progress.current
    has_validated = validation._has_run and progress.ready == progress.completed
    return Following.VALIDATION_END if has_validated else Following.BATCH_END


def is_at_end(trainer: Any) -> bool:
    """Return whether a fit has stopped exactly where its own limits, or a callback, end it.

    False for a fit that resumed after its limits, or within an epoch after them, and so ended at once.

    Args:
        trainer: Trainer after its fit.
    """
    fit_loop = trainer.fit_loop
    epoch = fit_loop.epoch_progress.current
    is_last_epoch = 0 < epoch.ready == epoch.processed == fit_loop.max_epochs
    return bool(trainer.should_stop or is_last_epoch or trainer.global_step == fit_loop.max_steps)


def settle(fit_loop: dict[str, Any], follows: Following) -> None:
    """Change a fit loop's saved progress to that of a loop that has finished what came before.

    Args:
        fit_loop: The value of ``"fit_loop"`` in the loops of a checkpoint; changed in place.
        follows: What the fit does next.
    """
    epoch, batch = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    for of_epoch in (epoch["current"], epoch["total"]):
        if follows is Following.EPOCH:
            of_epoch.update(dict.fromkeys(("ready", "started", "completed"), of_epoch["processed"]))
        else:
            of_epoch.update(dict.fromkeys(("processed", "completed"), of_epoch["ready"] - 1))
    if follows is Following.EPOCH:
        return
    if batch["current"]["ready"] > batch["current"]["processed"]:
        batch["is_last_batch"] = False
    for of_batch in (batch["current"], batch["total"]):
        of_batch.update(dict.fromkeys(("ready", "started", "completed"), of_batch["processed"]))


def is_between_steps(fit_loop: dict[str, Any]) -> bool:
    """Return whether a checkpoint was saved between the batches of an optimizer step, whose gradients it lacks.

    Args:
        fit_loop: The value of ``"fit_loop"`` in the loops of the checkpoint.
    """
    done = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    # Lightning zeroes gradients before the first batch of each step.
    return bool(done["zero_grad"]["total"]["completed"] > done["step"]["total"]["completed"])


def is_within_step(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint was saved within a batch or a step, which a fit that resumes from it may repeat.

    Args:
        checkpoint: What Lightning saves with the model.
    """
    fit_loop = checkpoint["loops"]["fit_loop"]
    batch = fit_loop["epoch_loop.batch_progress"]["current"]
    return is_between_steps(fit_loop) or bool(batch["ready"] > batch["processed"])
