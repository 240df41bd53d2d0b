"""Writes and reads a checkpoint's files for DeepSpeed's engine, the optimizer's state window by window."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch.serialization import MAP_LOCATION

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints import optimizer_state
from lightning_smartinfinity.zero3.checkpoints.tensor_file import saved_with_room
from lightning_smartinfinity.zero3.collectives import raising_together
from lightning_smartinfinity.zero3.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.untyped import Pickled, SavedState

__all__ = ["SmartInfinityCheckpointEngine"]


class SmartInfinityCheckpointEngine(TorchCheckpointEngine):
    """Writes and reads the files of ``TorchCheckpointEngine``, but the optimizer's state in bounded memory.

    Args:
        config_params: Parameters that DeepSpeed passes.
        optimizer: The optimizer whose state is saved.
    """

    def __init__(self, config_params: object, *, optimizer: StorageOptimizer) -> None:
        super().__init__(config_params)
        self._optimizer = optimizer

    def save(self, state_dict: SavedState, path: str) -> None:
        """Write one file and flush it to the device. Collective: a failure on one rank raises on every rank."""
        with raising_together(), _writing(path):
            if optimizer_state.is_described(state_dict.get(OPTIMIZER_STATE_DICT)):
                self._save_optimizer(state_dict, Path(path))
            else:
                torch.save(state_dict, path)
                _flush(path)

    def load(self, path: str, map_location: MAP_LOCATION = None) -> Pickled:
        """Map one file. Its tensors are read when they are used, and those of the optimizer window by window."""
        state = torch.load(path, map_location=map_location, mmap=True, weights_only=False)
        saved = state.get(OPTIMIZER_STATE_DICT)
        if saved is not None:
            saved[optimizer_state.FILE] = path
        return state

    def _save_optimizer(self, state_dict: SavedState, path: Path) -> None:
        with closing(saved_with_room(state_dict, path)) as file:
            optimizer_state.write_arrays(self._optimizer, file)
            file.flush()


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint file {path} could not be written: {error}.",
            "Free space there or save to another file system. What the path held before is still whole.",
        ) from error


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
