"""A universal checkpoint: what a ZeRO-3 checkpoint holds of each parameter, joined in files of its own.

::

    <folder>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    flat, without padding; the optimizer's own arrays
    <folder>/zero/optimizer_state.pt                                the first rank's optimizer file
    <folder>/zero/crc32c.pt                                         checksums of blocks of every array
    <folder>/zero_pp_rank_<rank>_mp_rank_00_model_states.pt         as every rank saved it

DeepSpeed's ``ds_to_universal`` writes it for Adam's checkpoints, without checksums of blocks;
:mod:`universal_conversion` for those of every rule.

Mapping a file verifies nothing. The ``check_`` methods read each file whole on one rank, and verify the CRC-32s that
``torch.save`` keeps, before anything is loaded. What is loaded later is read again, and :meth:`UniversalFolder.values`
compares it with the checksums of its blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES
from numpy.typing import NDArray
from typing_extensions import override

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.block_checksums import CHECKSUMMED, CHECKSUMS_NAME, verified
from lightning_smartinfinity.zero3.checkpoints.optimizer_state import EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.saved_weights import (
    SAVE_ID,
    Put,
    SavedWeights,
    Wanted,
    holds,
    read_saved,
    slices_of,
)
from lightning_smartinfinity.zero3.checkpoints.stock_checkpoint import STEP
from lightning_smartinfinity.zero3.checkpoints.tensor_file import TensorFile, check_records
from lightning_smartinfinity.zero3.collectives import gather
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["MASTER_FILE", "UniversalFolder", "is_universal"]

MASTER_FILE = "fp32"


def is_universal(path: str | Path) -> bool:
    """Return whether a folder is a universal checkpoint. This is a collective: all ranks agree."""
    # Unlike Path, os.path does not raise if a folder is unreadable: a rank that raised would leave the others waiting.
    return any(gather(os.path.isdir(Path(path) / "zero"), None))


class UniversalFolder(SavedWeights):
    """Reads a universal checkpoint."""

    remedy = "Convert the checkpoint again."

    def __init__(self, path: Path, *, rank: int, world_size: int) -> None:
        super().__init__(path, rank=rank, world_size=world_size)
        self._share = slice(rank, None, world_size)

    def check_states(self, *, with_optimizer: bool) -> None:
        """Verify this rank's share of the files that hold no arrays of trainable parameters.

        Args:
            with_optimizer: Whether :attr:`optimizer_states` will be used.
        """
        self._check([self.model_file(rank) for rank in range(self.num_saved)], tensors=True)
        if with_optimizer:
            self._check([self.path / "zero" / "optimizer_state.pt"], tensors=False)
            self._check([self.path / "zero" / CHECKSUMS_NAME], tensors=True)
            self.require_checksums()

    def check_arrays(self, names: Iterable[str]) -> None:
        """Verify this rank's share of the arrays of trainable parameters: ``fp32``, ``exp_avg`` and the like."""
        self._check(sorted(file for name in names for file in self.path.glob(f"zero/*/{name}.pt")), tensors=True)

    def _check(self, files: list[Path], *, tensors: bool) -> None:
        for file in files[self._share]:
            if file.is_file():  # a missing file raises when it is used
                check_records(file, tensors=tensors, remedy=self.remedy)

    @cached_property
    def optimizer_states(self) -> SavedState:
        """The optimizer file of the first rank; its flat tensors are not used."""
        states: SavedState = self._load(self.path / "zero" / "optimizer_state.pt")
        return states

    @property
    def extra(self) -> SavedState | None:
        """Entries that this strategy added to DeepSpeed's format; None if stock DeepSpeed saved the checkpoint."""
        return self.optimizer_states.get(EXTRA_KEY)

    @property
    def param_groups(self) -> list[SavedState]:
        """The optimizer's parameter groups, whose ``params`` are names."""
        names = [list(shapes) for shapes in self.model_states[PARAM_SHAPES]]
        return [
            {**group, "params": [name for sub_group in group["params"] for name in names[sub_group]]}
            for group in self.optimizer_states[OPTIMIZER_STATE_DICT]["param_groups"]
        ]

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays saved beside the master; none if the optimizer had not begun to keep any."""
        names = {name for state in self._states_of_sub_groups.values() for name in state}
        return tuple(sorted(names - {STEP}))

    @property
    def _states_of_sub_groups(self) -> Mapping[int, SavedState]:
        states: Mapping[int, SavedState] = self.optimizer_states[OPTIMIZER_STATE_DICT]["state"]
        return states

    @property
    def steps(self) -> dict[str, int]:
        """Number of updates of every trainable parameter. Stock DeepSpeed counts them per sub-group, if at all."""
        if self.extra is not None:
            names = [name for name, *_ in self.extra["parameters"]]
            return dict(zip(names, self.extra["steps"], strict=True))
        states = self._states_of_sub_groups
        return {
            # Where no count was saved, 1 says that the arrays have been updated.
            name: int(states[sub_group].get(STEP, 1)) if states.get(sub_group) else 0
            for sub_group, shapes in enumerate(self.model_states[PARAM_SHAPES])
            for name in shapes
        }

    def tensor(self, name: str, array: str, *, numel: int) -> torch.Tensor:
        """Return one flat fp32 array of one parameter, mapped from its file.

        Args:
            name: Name of the parameter.
            array: Name of the array: ``fp32``, ``exp_avg`` and the like.
            numel: Number of elements that it has to have.
        """
        file = self.array_file(name, array)
        tensor = self._load(file)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.numel()) != (torch.float32, numel):
            raise CheckpointError(f"{file} does not hold {numel} elements of float32.", self.remedy)
        return tensor.detach().flatten()

    def values(self, tensor: torch.Tensor, name: str, array: str, begin: int, end: int) -> NDArray[np.float32]:
        """Return some values of an array, after comparing them with the checksums of their blocks if there are any.

        Args:
            tensor: What :meth:`tensor` has returned for it.
            name: Name of the parameter.
            array: Name of the array.
            begin: Index of the first value.
            end: Index behind the last value.

        Raises:
            CheckpointError: A checksum is wrong or missing.
        """
        file = self.array_file(name, array)
        if self._checksums is None:
            return tensor[begin:end].numpy()
        checksums = self._checksums.get(str(file.relative_to(self.path / "zero")), [])
        return verified(tensor, begin, end, checksums, file=file, remedy=self.remedy)

    @cached_property
    def _checksums(self) -> dict[str, list[int]] | None:
        """The checksums of all arrays; None in a folder of DeepSpeed's, which has none."""
        file = self.path / "zero" / CHECKSUMS_NAME
        return {name: sums.tolist() for name, sums in self._load(file).items()} if file.is_file() else None

    def require_checksums(self) -> None:
        """Raise if the file of checksums is missing that was written with the folder."""
        file = self.path / "zero" / CHECKSUMS_NAME
        if self.optimizer_states.get(CHECKSUMMED) and not file.is_file():
            raise self._absent(file)

    def check_save(self) -> None:
        """Raise if the optimizer's state and the model states come from different saves."""
        if self.extra is not None and self.model_states.get(SAVE_ID) != self.extra["save_id"]:
            raise self._different_saves()

    @override
    def require_whole(self) -> None:
        self.check_states(with_optimizer=False)
        self.check_arrays([MASTER_FILE])
        for name, shape in self.shapes.items():
            self.tensor(name, MASTER_FILE, numel=shape.numel())

    @override
    def read_masters(self, wanted: Wanted, put: Put) -> None:
        for name, shape in self.shapes.items():
            slices = slices_of({name: shape}, rank=0, world_size=1)
            if holds(slices, wanted):
                with closing(TensorFile(self.array_file(name, MASTER_FILE))) as file:
                    read_saved(file, [file.state], slices, wanted, put)

    def array_file(self, name: str, array: str) -> Path:
        """Return the path of the file with one array of one parameter."""
        return self.path / "zero" / name / f"{array}.pt"
