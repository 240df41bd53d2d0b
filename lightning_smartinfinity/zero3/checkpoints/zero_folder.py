"""The folder that ZeRO-3 saves, with this strategy or without: each process's slices in files of its own."""

from __future__ import annotations

from contextlib import closing
from functools import cached_property
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARTITION_COUNT
from typing_extensions import override

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.folder_check import optimizer_files
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
from lightning_smartinfinity.zero3.checkpoints.tensor_file import TensorFile
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["ZeroFolder"]


class ZeroFolder(SavedWeights):
    """The weights of an ordinary checkpoint, which any number of processes saved.

    A process reads every file that holds a part of its slices, and reads it whole. If as many processes saved the
    checkpoint, this is only its own file.
    """

    remedy = "Use another checkpoint."

    @property
    @override
    def module(self) -> SavedState:
        # All ranks use the first process's, however many processes saved the checkpoint.
        module: SavedState = self._first_model_states["module"]
        return module

    @override
    def require_whole(self) -> None:
        found, saved = len(optimizer_files(self.path)), self.model_states["dp_world_size"]
        if found != saved:
            raise CheckpointError(
                f"{self.path} holds the optimizer states of {found} processes; {saved} saved the checkpoint.",
                self.remedy,
            )

    @override
    def read_masters(self, wanted: Wanted, put: Put) -> None:
        shapes = self.shapes
        for rank in range(self.num_saved):
            slices = slices_of(shapes, rank=rank, world_size=self.num_saved)
            if holds(slices, wanted):
                with closing(TensorFile(self.optimizer_file(rank))) as file:
                    read_saved(file, self.masters(file, rank), slices, wanted, put)

    def optimizer_file(self, rank: int) -> Path:
        """Return the path of the optimizer state that a process saved."""
        prefix = optimizer_files(self.path)[0].name.partition("zero_pp_rank_")[0]
        return self.path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    @cached_property
    def optimizer_states(self) -> SavedState:
        """The optimizer state that the first process saved.

        Raises:
            CheckpointError: The file holds none.
        """
        file = self.optimizer_file(0)
        states: SavedState = self._load(file)[OPTIMIZER_STATE_DICT]
        flat = states.get(OPTIMIZER_STATE_DICT)
        if not isinstance(flat, dict) or not {"state", "param_groups"} <= flat.keys():
            raise CheckpointError(
                f"The optimizer state in {str(file)!r} has no entry 'state' or 'param_groups': the file is damaged.",
                "Use another checkpoint.",
            )
        return states

    def masters(self, file: TensorFile, rank: int) -> list[torch.Tensor]:
        """Return the masters in a process's :meth:`optimizer_file`, one after another.

        Raises:
            CheckpointError: They are not exactly the process's slices, or come from another save.
        """
        slices = slices_of(self.shapes, rank=rank, world_size=self.num_saved)
        numel = sum(each.end - each.begin + each.padding for each in slices)
        state = file.state[OPTIMIZER_STATE_DICT]
        masters: list[torch.Tensor] = state[FP32_FLAT_GROUPS]
        found = sum(master.numel() for master in masters)
        if numel and not found:
            raise CheckpointError(
                f"{self.path} was saved by stock DeepSpeed with its optimizer state on NVMe: masters are not in it.",
                "Resume that training in DeepSpeed without NVMe and save again.",
            )
        if (found, state[PARTITION_COUNT]) != (numel, self.num_saved) or any(
            master.dtype != torch.float32 for master in masters
        ):
            raise CheckpointError(
                f"{self.optimizer_file(rank)} holds {found} elements of {state[PARTITION_COUNT]} processes where "
                f"{numel} elements of float32 of {self.num_saved} belong.",
                self.remedy,
            )
        saves = {states[SAVE_ID] for states in (self._first_model_states, self.model_states) if SAVE_ID in states}
        # A save has no name if the engine made it without the strategy.
        if saves and EXTRA_KEY in state and saves != {state[EXTRA_KEY]["save_id"]}:
            raise self._different_saves()
        return masters
