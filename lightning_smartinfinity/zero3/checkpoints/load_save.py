"""An engine's checkpoint, read for Trainer and Fabric, written for Fabric: model, its state and what a user adds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lightning_smartinfinity.zero3.checkpoints.client_state import of_user
from lightning_smartinfinity.zero3.checkpoints.folder_check import check_checkpoint, check_same_save, reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.full_weights import load_full_weights
from lightning_smartinfinity.zero3.checkpoints.universal import load_universal
from lightning_smartinfinity.zero3.checkpoints.universal_folder import is_universal
from lightning_smartinfinity.zero3.checkpoints.weight_loading import load_saved_weights
from lightning_smartinfinity.zero3.untyped import ClientState, DeepSpeedEngine, SavedState

__all__ = ["load_engine", "load_weights", "save_engine"]

_TAG = "checkpoint"


def save_engine(engine: DeepSpeedEngine, path: str | Path, client_state: ClientState, *, exclude_frozen: bool) -> None:
    """Save the trained model, its optimizer state and what else is to lie in the same files."""
    engine.save_checkpoint(str(path), client_state=client_state, tag=_TAG, exclude_frozen_parameters=exclude_frozen)


def load_engine(
    path: str | Path, engine: DeepSpeedEngine, *, with_optimizer: bool, strict: bool, needed: Collection[str] = ()
) -> ClientState:
    """Load into an engine; what the user had saved beside it is returned.

    Args:
        path: A folder saved by this strategy, by stock DeepSpeed with ZeRO-3, or converted to a universal one.
        engine: One of ours.
        with_optimizer: Whether to go on from there, or to load weights alone.
        strict: Whether names of parameters and buffers have to be the same.
        needed: Keys of what has to lie beside the model, if training goes on.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it is not one of this model.
    """
    if not with_optimizer:
        return load_saved_weights(engine, path, strict=strict)
    if is_universal(path):
        return load_universal(engine, path, strict=strict, needed=needed)
    folder = check_checkpoint(path, engine=engine, strict=strict, needed=needed)
    with reading_checkpoint(path):
        _, client_state = engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_lr_scheduler_states=False, load_module_strict=strict
        )
    check_same_save(engine, client_state)
    return of_user(client_state)


def load_weights(weights: SavedState, engine: DeepSpeedEngine, *, trained: bool, strict: bool) -> None:
    """Load a plain state dict, alike on all ranks, into an engine, and into the masters if it is being trained."""
    writes = engine.optimizer.outside_writes if trained else None
    load_full_weights(engine.module, weights, writes=writes, strict=strict)
