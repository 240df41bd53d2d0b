"""The folder that ZeRO-3 saves, with or without this strategy: separate files for each process's slices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARTITION_COUNT
from numpy.typing import NDArray
from typing_extensions import override

from lightning_smartinfinity.common.progress import Advance, showing_progress
from lightning_smartinfinity.common.update_rules import optimizer_names
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import (
    BlockChecksums,
    Checksums,
    SavedArray,
    VerifiedBlocks,
)
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import (
    optimizer_files,
    reading_checkpoint,
)
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import FoundCheckpoint
from lightning_smartinfinity.zero3.checkpoints.formats.optimizer_state import require_resumable
from lightning_smartinfinity.zero3.checkpoints.formats.saved_training import MASTERS, SavedTraining
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import (
    SAVE_ID,
    WINDOW_NUMEL,
    Put,
    Wanted,
    holds,
    read_saved,
    require_rank,
    slices_of,
    windows,
)
from lightning_smartinfinity.zero3.checkpoints.formats.stock_checkpoint import STEP
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, TensorStream, check_records
from lightning_smartinfinity.zero3.checkpoints.formats.trust import read_mapped
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["ZeroFolder"]


class ZeroFolder(SavedTraining):
    """An ordinary checkpoint, which any number of processes saved.

    :meth:`read_masters` completely reads every file that holds wanted elements. If the same number of processes saved
    the checkpoint, that is only the process's own file. For :meth:`read` the processes share the work of verifying all
    files, and exchange block checksums; then each reads the blocks that hold its slices.
    """

    remedy = "Use another checkpoint."

    def __init__(
        self, path: Path, *, rank: int, world_size: int, num_saved: int | None = None, parts: Sequence[Path] = ()
    ) -> None:
        super().__init__(path, rank=rank, world_size=world_size, num_saved=num_saved, parts=parts)
        self._parts = tuple(parts)
        self._share = slice(rank, None, world_size)
        self._opened = ExitStack()
        self._streams: dict[str, dict[str, TensorStream]] = {}
        self._blocks: VerifiedBlocks | None = None

    @classmethod
    def of(cls, found: FoundCheckpoint) -> ZeroFolder:
        """Open a checkpoint for all ranks to load. Collective if machines have only parts of it."""
        rank, num_saved = dist.get_rank(), found.num_saved if found.in_parts else None
        saved = cls(found.folder, rank=rank, world_size=dist.get_world_size(), num_saved=num_saved)
        if found.in_parts:
            first: SavedState | None = None
            with raising_together(), reading_checkpoint(found.folder):
                first = saved.states_for_others() if rank == 0 else None
            (first, *_) = gather(first, None)
            assert first is not None
            saved.take_first_states(first)
        return saved

    @override
    def check_states(self) -> None:
        self.require_whole()
        require_resumable(self.optimizer_states.get(EXTRA_KEY), self.path)
        for rank in range(self.num_saved)[self._share]:
            check_records(self.optimizer_file(rank), tensors=False)  # its tensors are verified when read
            check_records(self.model_file(rank), tensors=True)
        self.require_one_save()

    @override
    def check_arrays(self, names: Collection[str]) -> Checksums:
        share = [(rank, name) for rank in range(self.num_saved) for name in names][self._share]
        streams = {self._array(rank, name): self.streams(rank)[name] for rank, name in share}
        nbytes = sum(stream.nbytes for stream in streams.values())
        with showing_progress("Verifying the optimizer state", nbytes, shown=self._share.start == 0) as advance:
            return {array: _checksums_of(stream, advance) for array, stream in streams.items()}

    @override
    def begin_reading(self, checksums: Checksums) -> None:
        def read(array: SavedArray, begin: int, end: int) -> NDArray[np.float32]:
            return self._streams[array.file][array.name].values(begin, end)

        self._blocks = VerifiedBlocks(read, checksums, folder=self.path, remedy=self.remedy)

    @override
    def read(self, name: str, array: str, begin: int, values: NDArray[np.float32]) -> None:
        assert self._blocks is not None, "begin_reading comes first"
        offset, per_rank = self._places[name]
        while values.size:
            rank, skipped = divmod(begin, per_rank)
            self.streams(rank)
            part = values[: per_rank - skipped]
            self._blocks.copy(self._array(rank, array), offset + skipped, part)
            begin, values = begin + part.size, values[part.size :]

    def _array(self, rank: int, name: str) -> SavedArray:
        return SavedArray(self.optimizer_file(rank).name, name)

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Each parameter's offset in the processes' arrays, and the length of its slices with padding."""
        places, offset = {}, 0
        for each in slices_of(self.shapes, rank=0, world_size=self.num_saved):
            numel = each.end - each.begin + each.padding
            places[each.name] = (offset, numel)
            offset += numel
        return places

    @override
    def close(self) -> None:
        self._opened.close()
        self._streams.clear()
        self._blocks = None

    @property
    @override
    def module(self) -> SavedState:
        # All ranks use the first process's module, regardless of how many processes saved the checkpoint.
        return read_mapped(self._first_model_states["module"], self.path)

    @override
    def require_whole(self) -> None:
        if self.in_parts:
            return
        found, saved = (
            sum(len(optimizer_files(each)) for each in (self.path, *self._parts)),
            self.model_states["dp_world_size"],
        )
        if found != saved:
            raise CheckpointError(
                f"{self.path} holds the optimizer states of {found} processes; {saved} saved the checkpoint.",
                "Copy checkpoints as whole folders, or use another one.",
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
        """Return the path of a process's optimizer state."""
        return self.file(f"{self._prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    @cached_property
    def _prefix(self) -> str:
        return optimizer_files(self.path)[0].name.partition("zero_pp_rank_")[0]

    @cached_property
    @override
    def optimizer_states(self) -> SavedState:
        file = self.optimizer_file(0)
        states: SavedState = self._load(file)[OPTIMIZER_STATE_DICT]
        flat = states.get(OPTIMIZER_STATE_DICT)
        if not isinstance(flat, dict) or not {"state", "param_groups"} <= flat.keys():
            raise CheckpointError(
                f"The optimizer state in {str(file)!r} has no entry 'state' or 'param_groups': the file is damaged.",
                "Use another checkpoint.",
            )
        return states

    def streams(self, rank: int) -> dict[str, TensorStream]:
        """Return streams over a process's slices of every array, by array name. :meth:`close` closes the file.

        Raises:
            CheckpointError: The process saved other arrays than the first process, or the arrays do not fit its slices.
        """
        path = self.optimizer_file(rank)
        if path.name not in self._streams:
            file = TensorFile(path)
            self._opened.callback(file.close)
            arrays = _arrays_in(file, self.masters(file, rank))
            if arrays.keys() != {MASTERS, *self.arrays}:
                raise CheckpointError(
                    f"The processes that saved {self.path} kept different states of the optimizer.", self.remedy
                )
            self._streams[path.name] = {name: file.stream(tensors) for name, tensors in arrays.items()}
        return self._streams[path.name]

    def masters(self, file: TensorFile, rank: int) -> list[torch.Tensor]:
        """Return the masters in a process's :meth:`optimizer_file`, in order.

        Raises:
            CheckpointError: The masters are not exactly the process's slices, or come from another save.
        """
        require_rank(file.state[OPTIMIZER_STATE_DICT].get(EXTRA_KEY, {}).get("rank"), rank, self.optimizer_file(rank))
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
        # A save without this strategy has no id.
        if saves and EXTRA_KEY in state and saves != {state[EXTRA_KEY]["save_id"]}:
            raise self._different_saves()
        return masters


def _arrays_in(file: TensorFile, masters: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of every array by name, one per sub-group."""
    states = file.state[OPTIMIZER_STATE_DICT][OPTIMIZER_STATE_DICT]["state"]
    names = sorted({name for state in states.values() for name in state} - {STEP})
    if not all(map(str.isidentifier, names)):  # a conversion uses them as file names
        raise CheckpointError(f"The optimizer keeps arrays of the names {names}.", "Use another checkpoint.")
    arrays = {name: [states[index].get(name) for index in range(len(masters))] for name in names}
    for name, tensors in arrays.items():
        for tensor, master in zip(tensors, masters, strict=True):
            if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.numel()) != (master.dtype, master.numel()):
                raise CheckpointError(
                    f"The optimizer's {name!r} is no array in float32 of every element of every parameter.",
                    f"Use checkpoints of {optimizer_names()} in which all parameter groups keep the same arrays: "
                    "momentum, for example, in all of them or in none.",
                )
    return {MASTERS: masters, **arrays}


def _checksums_of(stream: TensorStream, advance: Advance) -> list[int]:
    """Read and verify a whole stream, and return its block checksums."""
    checksums, numel = BlockChecksums(), stream.nbytes // np.dtype(np.float32).itemsize
    buffer = np.empty(min(WINDOW_NUMEL, numel), np.float32)
    for begin, end in windows(0, numel):
        values = buffer[: end - begin]
        stream.read(values)
        checksums.add(values)
        advance(values.nbytes)
    return checksums.values
