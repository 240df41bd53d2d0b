"""Reads the weights of a checkpoint folder in a single process, with bounded memory."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from functools import cached_property
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import BUFFER_NAMES, FROZEN_PARAM_FRAGMENTS
from typing_extensions import override

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import (
    has_universal,
    optimizer_files,
    reading_checkpoint,
    tagged_folder,
)
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import MODEL_KEY, user_state
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import Put, SavedWeights, windows
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, check_records
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import Contents, TensorSpec, WeightSource
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

__all__ = ["CheckpointWeights"]


class CheckpointWeights(WeightSource):
    """The weights in a folder that this strategy or stock DeepSpeed saved with ZeRO-3, or in a universal checkpoint.

    Any number of processes may have saved it; this process reads all of their files, and verifies their checksums.

    Args:
        path: The folder that Lightning or DeepSpeed saved, or the folder in it that holds the files.

    Raises:
        CheckpointError: The path is no checkpoint folder, files are missing, or a file is damaged. Masters are verified
            only when they are read.
    """

    def __init__(self, path: str | Path) -> None:
        with reading_checkpoint(path):
            self._folder = _opened(Path(path))
            _check(self._folder)

    @property
    def path(self) -> Path:
        """The folder with the files of the processes."""
        return self._folder.path

    @property
    def saved_models(self) -> SavedState | None:
        """The strategy's description of transformers models in the module; None if it saved none."""
        with reading_checkpoint(self.path):
            saved: SavedState | None = self._folder.model_states.get(MODEL_KEY)
        return saved

    @property
    def lacks_frozen(self) -> bool:
        """Whether untrained parameters were left out (``exclude_frozen_parameters``), if the model has any."""
        with reading_checkpoint(self.path):
            return self._folder.frozen_shapes() is None

    def client_state(self) -> ClientState:
        """Return the state that Lightning or the user saved with the model."""
        with reading_checkpoint(self.path):
            return user_state(self._folder.model_states)

    @cached_property
    @override
    def contents(self) -> Contents:
        with reading_checkpoint(self.path):
            return _contents(self._folder)

    def state_dict_order(self) -> list[str]:
        """Return the keys of the module's state dict in order."""
        with reading_checkpoint(self.path):
            return list(self._folder.module)

    def other(self, name: str) -> object:
        """Return an entry of the state dict that is not a tensor."""
        return self._folder.module[name]

    @override
    def read(self, names: Collection[str], put: Put, *, masters: bool) -> None:
        specs = self.contents.parameters
        wanted = {name: range(specs[name].numel) for name in names}
        with reading_checkpoint(self.path):
            self._folder.read_masters({name: wanted[name] for name in names if specs[name].trained}, put)
            for rank in range(self._folder.num_saved):
                _read_frozen(self._folder.model_file(rank), rank, {n: specs[n] for n in names}, put)


def _opened(path: Path) -> SavedWeights:
    if has_universal(path):
        return UniversalFolder(path, rank=0, world_size=1)
    folder = tagged_folder(path)
    if not optimizer_files(folder):
        raise CheckpointError(f"{folder} holds no ZeRO-3 optimizer states.", "Pass a ZeRO-3 checkpoint.")
    return ZeroFolder(folder, rank=0, world_size=1)


def _check(folder: SavedWeights) -> None:
    folder.require_whole()
    for rank in range(folder.num_saved):
        check_records(folder.model_file(rank), tensors=True)
        if isinstance(folder, ZeroFolder):
            check_records(folder.optimizer_file(rank), tensors=False)  # its tensors are verified when read
    folder.require_one_save()


def _contents(folder: SavedWeights) -> Contents:
    module = folder.module
    trained = {name: TensorSpec(shape, module[name].dtype, trained=True) for name, shape in folder.shapes.items()}
    fragments = folder.model_states.get(FROZEN_PARAM_FRAGMENTS) or {}
    # In the module's dtype: the file may hold fp32 values of a 16-bit parameter that was written in fp32.
    frozen = {
        name: TensorSpec(shape, module[name].dtype if name in module else fragments[name].dtype)
        for name, shape in (folder.frozen_shapes() or {}).items()
    }
    parameters = {**trained, **frozen}
    aliases = {alias: name for alias, name in folder.shared.items() if name in parameters}
    rest = {name: value for name, value in module.items() if name not in parameters.keys() | aliases.keys()}
    named = folder.model_states.get(BUFFER_NAMES) or ()
    return Contents(
        parameters=parameters,
        aliases=aliases,
        # Frozen parameters that were left out may have placeholders without elements.
        buffers={n: v for n, v in rest.items() if isinstance(v, torch.Tensor) and (v.numel() or n in named)},
        others=[name for name, value in rest.items() if not isinstance(value, torch.Tensor)],
    )


def _read_frozen(file: Path, rank: int, specs: dict[str, TensorSpec], put: Put) -> None:
    """Pass one process's slices of frozen parameters to ``put``. Not by mapping: pages read would stay in memory."""
    frozen = {name: spec for name, spec in specs.items() if not spec.trained}
    if not frozen:
        return
    with closing(TensorFile(file)) as opened:
        for name, spec in frozen.items():
            fragment = opened.state[FROZEN_PARAM_FRAGMENTS][name]
            first = rank * fragment.numel()
            for begin, end in windows(0, min(fragment.numel(), spec.numel - first)):
                values = torch.empty(end - begin, dtype=fragment.dtype)
                opened.read(fragment, begin, values)
                put(name, first + begin, values.to(spec.dtype))
