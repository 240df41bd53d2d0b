"""Loads an engine's checkpoint for Trainer and Fabric, and saves one for Fabric: model, optimizer and client state."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist

from lightning_smartinfinity.zero3.checkpoints.formats.client_state import user_state
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import await_seen
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder, is_universal
from lightning_smartinfinity.zero3.checkpoints.load.full_weights import load_full_weights
from lightning_smartinfinity.zero3.checkpoints.load.resharding import load_resharded
from lightning_smartinfinity.zero3.checkpoints.load.weight_loading import load_saved_weights
from lightning_smartinfinity.zero3.engine.portable import PortableEngine
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

__all__ = ["load_engine", "load_weights", "save_engine"]

_TAG = "checkpoint"


def save_engine(
    engine: SmartInfinityEngine, path: str | Path, client_state: ClientState, *, exclude_frozen: bool
) -> None:
    """Save the trained model, its optimizer state and ``client_state`` in the same files."""
    engine.save_checkpoint(str(path), client_state=client_state, tag=_TAG, exclude_frozen_parameters=exclude_frozen)


def load_engine(
    path: str | Path, engine: PortableEngine, *, with_optimizer: bool, strict: bool, needed: Collection[str] = ()
) -> ClientState:
    """Load a checkpoint into an engine, and return the state that the user saved with the model.

    Args:
        path: A folder saved by this strategy, by stock DeepSpeed with ZeRO-3, or converted to a universal one.
        engine: Engine of this strategy.
        with_optimizer: Whether to resume the training; if false, only weights are loaded.
        strict: Whether the names of parameters and buffers must match.
        needed: Keys that must have been saved with the model if the training resumes.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it belongs to another model.
    """
    await_seen(path)
    if not with_optimizer:
        return load_saved_weights(engine, path, strict=strict)
    if is_universal(path):
        universal = UniversalFolder(Path(path), rank=dist.get_rank(), world_size=dist.get_world_size())
        return load_resharded(engine, universal, strict=strict, needed=needed)
    _, client_state = engine.load_checkpoint(
        path, load_module_strict=strict, load_lr_scheduler_states=False, needed=needed
    )
    return user_state(client_state)


def load_weights(weights: SavedState, engine: PortableEngine, *, trained: bool, strict: bool) -> None:
    """Load a plain state dict, the same on all ranks, into an engine and, if ``trained``, into the masters."""
    writes = engine.optimizer.outside_writes if trained else None
    load_full_weights(engine.module, weights, writes=writes, strict=strict)
