"""Writes and reads checkpoint files for DeepSpeed's engine; the optimizer's state window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch.serialization import MAP_LOCATION

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.zero3.checkpoints.folders.flushed_file import save_flushed
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import writing
from lightning_smartinfinity.zero3.checkpoints.formats import optimizer_state
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, saved_with_room
from lightning_smartinfinity.zero3.checkpoints.formats.trust import ReadWhenUsed, load_file, read_mapped, warn_of_types
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.ranks.collectives import raising_together, show_on_rank_zero
from lightning_smartinfinity.zero3.untyped import Pickled, SavedState

__all__ = ["SmartInfinityCheckpointEngine"]


class SmartInfinityCheckpointEngine(TorchCheckpointEngine):
    """Writes and reads the same files as ``TorchCheckpointEngine``, with bounded memory for the optimizer's state.

    Args:
        config_params: Parameters that DeepSpeed passes.
        optimizer: The optimizer whose state is saved.
    """

    def __init__(self, config_params: object, *, optimizer: StorageOptimizer) -> None:
        super().__init__(config_params)
        self._optimizer = optimizer
        self._leaves: Callable[[TensorFile], None] | None = None

    @contextmanager
    def leaving_arrays(self, left_open: list[TensorFile], closing_later: ExitStack) -> Iterator[None]:
        """Do not write the optimizer's arrays within this context; the caller writes them.

        Args:
            left_open: List to which the file of the optimizer's state, with room for the arrays, is added.
            closing_later: Context that closes that file.
        """

        def leave(file: TensorFile) -> None:
            closing_later.callback(file.close)
            left_open.append(file)

        with replaced(self, "_leaves", leave):
            yield

    def save(self, state_dict: SavedState, path: str) -> None:
        """Write one file and flush it to the device. Collective: a failure on one rank raises on every rank."""
        file = Path(path)
        with raising_together(), writing(path):
            limited("Creating", file.parent, file.parent.mkdir, exist_ok=True)
            if optimizer_state.is_described(state_dict.get(OPTIMIZER_STATE_DICT)):
                self._save_optimizer(state_dict, file)
            else:
                _save_model(state_dict, file)
            if dist.get_rank() == 0:
                limited("Reading", path, warn_of_types, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: :meth:`save` creates its folders, because a failure here would raise on one rank only."""

    def load(self, path: str, map_location: MAP_LOCATION = None) -> Pickled:
        """Map one file. Frozen parameters are read when used, and the optimizer's state window by window."""
        state = load_file(path, map_location=map_location, mmap=True)
        saved = state.get(OPTIMIZER_STATE_DICT)
        if saved is not None:
            saved[optimizer_state.FILE] = path
        if isinstance(state.get("module"), Mapping):
            state["module"] = read_mapped(state["module"], Path(path))
        if isinstance(state.get(FROZEN_PARAM_FRAGMENTS), Mapping):
            state[FROZEN_PARAM_FRAGMENTS] = ReadWhenUsed(state[FROZEN_PARAM_FRAGMENTS], Path(path))
        return state

    def _save_optimizer(self, state_dict: SavedState, path: Path) -> None:
        with ExitStack() as opened:
            file = opened.enter_context(closing(saved_with_room(state_dict, path)))
            if self._leaves is None:
                optimizer_state.write_arrays(self._optimizer, file)
                file.flush()
            else:
                self._leaves(file)
                opened.pop_all()


def _save_model(state_dict: SavedState, path: Path) -> None:
    """Save a file with buffers and untrained parameters, and flush it to the device."""
    total = sum(tensor.nbytes for tensor in _tensors_in(state_dict))
    with show_on_rank_zero("Saving the model", total) as advance:
        save_flushed(state_dict, path, advance=advance, total_bytes=total)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
