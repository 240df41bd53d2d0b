"""Saves and loads the residual of compressed gradients, as an entry that DeepSpeed's format does not define."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, room_for
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["SavedResidual", "begin_residual", "describe_residual", "write_residual"]

_log = logging.getLogger(__name__)

_KEY = "residual"
_CHUNK_NUMEL = 1 << 20


def describe_residual(optimizer: StorageOptimizer) -> SavedState:
    """Return the entry for :func:`write_residual`, a tensor without memory; empty if there is no residual to save."""
    residual = optimizer.rank_state.residual
    return {} if residual is None or optimizer.saves_weights_only else {_KEY: room_for(residual.numel())}


def write_residual(optimizer: StorageOptimizer, file: TensorFile, extra: SavedState) -> None:
    """Write the residual into a file with the entry of :func:`describe_residual`. No step may be in progress."""
    residual = optimizer.rank_state.residual
    if residual is not None and _KEY in extra:
        file.stream([extra[_KEY]]).write(residual.numpy())


def begin_residual(optimizer: StorageOptimizer, *, source: str = "the checkpoint") -> None:
    """Set the residual, if there is one, to zero, and warn on rank zero that the source has none."""
    residual = optimizer.rank_state.residual
    if residual is not None:
        if torch.distributed.get_rank() == 0:
            _log.warning("The residual of compressed gradients begins at zero: %s gives none.", source)
        residual.zero_()


class SavedResidual:
    """The residual in a checkpoint, for a training that resumes with one.

    Args:
        optimizer: Optimizer of this strategy.
        file: Optimizer file of this rank.
        extra: Entries that this strategy added to the file; none in a file of stock DeepSpeed.
        wanted: Whether to restore the residual; if not, it starts at zero.

    Raises:
        CheckpointError: The residual is damaged.
    """

    def __init__(self, optimizer: StorageOptimizer, file: TensorFile, extra: SavedState, *, wanted: bool) -> None:
        self._optimizer = optimizer
        self._residual = optimizer.rank_state.residual
        self._file = file
        self._saved: torch.Tensor | None = extra.get(_KEY) if wanted else None
        if self._residual is None:
            if self._saved is not None:
                _log.warning("The checkpoint's residual of compressed gradients is left out: there is no compression.")
            self._saved = None
        elif self._saved is not None:
            chunk = np.empty(min(_CHUNK_NUMEL, self._saved.numel()), np.float32)
            self._read(chunk[: end - begin] for begin, end in _chunks(self._saved.numel()))

    def restore(self) -> None:
        """Restore the saved residual, or start at zero."""
        if self._saved is None:
            begin_residual(self._optimizer)
        elif self._residual is not None:
            self._read([self._residual.numpy()])

    def _read(self, parts: Iterator[NDArray[np.float32]] | list[NDArray[np.float32]]) -> None:
        assert self._saved is not None
        stream = self._file.stream([self._saved])
        for part in parts:
            stream.read(part)


def _chunks(numel: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _CHUNK_NUMEL, numel)) for begin in range(0, numel, _CHUNK_NUMEL)]
