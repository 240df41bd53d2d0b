"""Writes and reads a checkpoint's files for DeepSpeed's engine, the optimizer's state window by window."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch.serialization import MAP_LOCATION
from typing_extensions import Buffer, override

from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
from lightning_smartinfinity.progress import Advance
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.zero3.checkpoints import optimizer_state
from lightning_smartinfinity.zero3.checkpoints.tensor_file import saved_with_room
from lightning_smartinfinity.zero3.checkpoints.trust import load_file, warn_of_types
from lightning_smartinfinity.zero3.collectives import raising_together, show_on_rank_zero
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
                _save_model(state_dict, path)
            if dist.get_rank() == 0:
                warn_of_types(path)

    def load(self, path: str, map_location: MAP_LOCATION = None) -> Pickled:
        """Map one file. Its tensors are read when they are used, and those of the optimizer window by window."""
        state = load_file(path, map_location=map_location, mmap=True)
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
    except SmartInfinityError:
        raise
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise CheckpointError(
            f"The checkpoint file {path} could not be written: {error}.",
            "Free space there or save to another file system. What the path held before is still whole.",
        ) from error


def _save_model(state_dict: SavedState, path: str) -> None:
    """Save a file with buffers and the parameters that are not trained, and flush it to the device."""
    total = sum(tensor.nbytes for tensor in _tensors_in(state_dict))
    with show_on_rank_zero("Saving the model", total) as advance, open(path, "wb") as file:
        torch.save(state_dict, cast(IO[bytes], _Reporting(file, advance, total_bytes=total)))
        file.flush()
        unless_idle(partial(os.fsync, file.fileno()), doing="Flushing", path=Path(path))


class _Reporting(io.RawIOBase):
    """Passes what is written to a file, and reports the bytes.

    Args:
        file: The file.
        advance: Is told the bytes.
        total_bytes: Number of bytes to report in all; more is written, since the file has headers.
    """

    def __init__(self, file: BinaryIO, advance: Advance, *, total_bytes: int) -> None:
        self._file = file
        self._advance = advance
        self._left = total_bytes

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, values: Buffer) -> int:
        written = self._file.write(values)
        reported = min(written, self._left)
        self._left -= reported
        self._advance(reported)
        return written


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
