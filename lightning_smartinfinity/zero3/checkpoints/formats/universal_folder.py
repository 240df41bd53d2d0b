"""A universal checkpoint: a ZeRO-3 checkpoint with each parameter's slices joined in separate files.

::

    <folder>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    flat, without padding; the optimizer's own arrays
    <folder>/zero/optimizer_state.pt                                the first rank's optimizer file
    <folder>/zero/crc32c.pt                                         checksums of blocks of every array
    <folder>/zero_pp_rank_<rank>_mp_rank_00_model_states.pt         as every rank saved it

DeepSpeed's ``ds_to_universal`` writes it for Adam's checkpoints, without block checksums; :mod:`universal_conversion`
writes it for every update rule.

Mapping a file verifies nothing. Before anything is loaded, the ``check_`` methods read each file completely on one
rank, and verify the CRC-32s that ``torch.save`` keeps. Loading reads the files again, and :meth:`UniversalFolder.read`
compares values with the block checksums.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import (
    CHECKSUMMED,
    CHECKSUMS_NAME,
    Checksums,
    SavedArray,
    VerifiedBlocks,
)
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import has_universal
from lightning_smartinfinity.zero3.checkpoints.formats.saved_training import MASTERS, SavedTraining
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import (
    SAVE_ID,
    Put,
    Wanted,
    holds,
    read_saved,
    slices_of,
)
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, check_records
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["UniversalFolder", "is_universal"]

_NUM_MAPPED = 8  # files: enough for all arrays of one parameter


def is_universal(path: str | Path) -> bool:
    """Return whether any rank finds a universal checkpoint in a folder. Collective: all ranks get the same result.

    Raises:
        CheckpointError: Another version of this package wrote it in a format that is not read; raised on every rank.
    """
    found = False
    with raising_together():
        found = limited("Looking at", path, has_universal, Path(path))
    return any(gather(found, None))


class UniversalFolder(SavedTraining):
    """Reads a universal checkpoint."""

    remedy = "Convert the checkpoint again."

    def __init__(self, path: Path, *, rank: int, world_size: int) -> None:
        super().__init__(path, rank=rank, world_size=world_size)
        self._share = slice(rank, None, world_size)

    @override
    def check_states(self) -> None:
        self._check_model_states()
        self._check([self.path / "zero" / "optimizer_state.pt"], tensors=False)
        self._check([self.path / "zero" / CHECKSUMS_NAME], tensors=True)
        self.require_checksums()
        self.check_save()

    def _check_model_states(self) -> None:
        self._check([self.model_file(rank) for rank in range(self.num_saved)], tensors=True)

    def require_arrays(self, names: Collection[str]) -> None:
        """Check that these arrays of all trained parameters exist, without reading them."""
        for name, shape in self.shapes.items():
            for array in names:
                self.require_array(name, array, numel=shape.numel())

    @override
    def check_arrays(self, names: Collection[str]) -> Checksums:
        self.require_arrays(names)
        self._check(sorted(file for name in names for file in self.path.glob(f"zero/*/{name}.pt")), tensors=True)
        return {}

    def _check(self, files: list[Path], *, tensors: bool) -> None:
        for file in files[self._share]:
            if file.is_file():  # a missing file raises when it is used
                check_records(file, tensors=tensors, remedy=self.remedy)

    @cached_property
    @override
    def optimizer_states(self) -> SavedState:
        states: SavedState = self._load(self.path / "zero" / "optimizer_state.pt")
        return states

    def require_array(self, name: str, array: str, *, numel: int) -> None:
        """Raise unless an array of one parameter has ``numel`` float32 elements."""
        file = self.array_file(name, array)
        tensor = self._load(file)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.numel()) != (torch.float32, numel):
            raise CheckpointError(f"{file} does not hold {numel} elements of float32.", self.remedy)

    @override
    def begin_reading(self, checksums: Checksums) -> None:
        del checksums  # the folder holds its own

    @override
    def read(self, name: str, array: str, begin: int, values: NDArray[np.float32]) -> None:
        self._blocks.copy(_saved_array(f"{name}/{array}.pt"), begin, values)

    @cached_property
    def _blocks(self) -> VerifiedBlocks:
        folder = self.path / "zero"
        mapped = lru_cache(_NUM_MAPPED)(self._load)

        def read(array: SavedArray, begin: int, end: int) -> NDArray[np.float32]:
            return np.array(mapped(folder / array.file).detach().flatten()[begin:end].numpy())

        return VerifiedBlocks(read, self._checksums, folder=folder, remedy=self.remedy)

    @property
    def _checksums(self) -> Checksums | None:
        """The checksums of all arrays; None in a folder that DeepSpeed wrote."""
        file = self.path / "zero" / CHECKSUMS_NAME
        if not file.is_file():
            return None
        return {_saved_array(name): sums.tolist() for name, sums in self._load(file).items()}

    def require_checksums(self) -> None:
        """Raise if the folder was written with a file of checksums, and that file is missing."""
        file = self.path / "zero" / CHECKSUMS_NAME
        if self.optimizer_states.get(CHECKSUMMED) and not file.is_file():
            raise self._absent(file)

    def check_save(self) -> None:
        """Raise if the optimizer's state and the model states come from different saves."""
        if self.extra is not None and self.model_states.get(SAVE_ID) != self.extra["save_id"]:
            raise self._different_saves()

    @override
    def require_whole(self) -> None:
        self._check_model_states()
        self.check_arrays([MASTERS])

    @override
    def read_masters(self, wanted: Wanted, put: Put) -> None:
        for name, shape in self.shapes.items():
            slices = slices_of({name: shape}, rank=0, world_size=1)
            if holds(slices, wanted):
                with closing(TensorFile(self.array_file(name, MASTERS))) as file:
                    read_saved(file, [file.state], slices, wanted, put)

    def array_file(self, name: str, array: str) -> Path:
        """Return the path of the file with one array of one parameter."""
        return self.path / "zero" / name / f"{array}.pt"


def _saved_array(file: str) -> SavedArray:
    return SavedArray(file, Path(file).stem)
