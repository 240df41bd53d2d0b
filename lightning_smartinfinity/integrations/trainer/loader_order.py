"""Keeps the order of the user's DataLoaders, to which Lightning adds a sampler that shuffles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import _is_dataloader_shuffled

from lightning_smartinfinity.common.patches import replaced

__all__ = ["keep_order"]

_OTHER_ORDER = (
    "This fit was begun by an earlier version, in which Lightning's DistributedSampler shuffled the batches of every "
    "{which} DataLoader. It continues in that order. For the order of the DataLoader itself, pass "
    "use_distributed_sampler=False to the Trainer."
)


def keep_order(trainer: pl.Trainer, keeps: Callable[[], bool], *, is_single: bool) -> None:
    """Keep the order of DataLoaders that a Trainer sets up.

    Lightning adds a DistributedSampler to each DataLoader of this strategy. In a fit this sampler shuffles, whether or
    not the DataLoader does. Here a single process keeps the DataLoader's own sampler, and with several processes the
    sampler shuffles if the DataLoader does.

    Args:
        trainer: The Trainer.
        keeps: Function that returns False while DataLoaders of a fit are set up that was begun in Lightning's order.
        is_single: Whether there is one process.
    """
    connector, accelerator = trainer._data_connector, trainer._accelerator_connector
    prepare = type(connector)._prepare_dataloader
    warned_of = set()

    def prepare_in_order(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        own_shuffle = bool(_is_dataloader_shuffled(dataloader)) if mode == RunningStage.TRAINING else shuffle
        if keeps():
            with replaced(accelerator, "use_distributed_sampler", False) if is_single else nullcontext():
                return prepare(connector, dataloader, own_shuffle, mode)
        prepared = prepare(connector, dataloader, shuffle, mode)
        is_other_order = shuffle if is_single else shuffle != own_shuffle
        if prepared is not dataloader and is_other_order and mode not in warned_of:
            warned_of.add(mode)
            rank_zero_warn(_OTHER_ORDER.format(which="training" if mode == RunningStage.TRAINING else "validation"))
        return prepared

    connector._prepare_dataloader = prepare_in_order  # type: ignore[method-assign]
