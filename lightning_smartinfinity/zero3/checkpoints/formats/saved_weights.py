"""Names, shapes and values of the weights in a checkpoint folder; values are read window by window."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES, PARAM_SHAPES

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.io.files import limited, listed
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, refused
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_file, read_mapped
from lightning_smartinfinity.zero3.untyped import Pickled, SavedState

__all__ = [
    "DAMAGE",
    "RANK_KEY",
    "SAVE_ID",
    "WINDOW_NUMEL",
    "Put",
    "SavedSlice",
    "SavedWeights",
    "Wanted",
    "holds",
    "read_saved",
    "slices_of",
    "windows",
]

DAMAGE = (
    OSError,
    EOFError,
    RuntimeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    ValueError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors that torch, pickle and DeepSpeed raise on a damaged file, or on a file that is no checkpoint."""

SAVE_ID = "smart_infinity_save"
"""Key of the save's random id in the model states."""

RANK_KEY = "smart_infinity_rank"
"""Key of the rank that saved a file of model states."""

WINDOW_NUMEL = 1 << 22
"""Largest number of elements in memory at once."""

_MODEL_FILES = "zero_pp_rank_*_mp_rank_00_model_states.pt"
_PART = re.compile(r"zero_pp_rank_[0-9]+_mp_rank_")

Wanted = Mapping[str, range]
"""The elements to read of each parameter, as indices into the flat, whole parameter."""

Put = Callable[[str, int, torch.Tensor], None]
"""Function called with a parameter's name, the index of the first element, and consecutive values.

The values are in host memory that is reused: copy values to keep them.
"""


class SavedSlice(NamedTuple):
    """The elements of a parameter that one process saved.

    Args:
        name: Name of the parameter.
        begin: Index of the first element in the whole parameter.
        end: Index after the last element.
        padding: Number of padding elements after the slice in the file.
    """

    name: str
    begin: int
    end: int
    padding: int


def slices_of(shapes: Mapping[str, torch.Size], *, rank: int, world_size: int) -> list[SavedSlice]:
    """Return the slices that one process saves; padding gives them the same length on all processes."""
    slices = []
    for name, shape in shapes.items():
        numel = shape.numel()
        per_rank = -(-numel // world_size)
        begin, end = (min(edge * per_rank, numel) for edge in (rank, rank + 1))
        slices.append(SavedSlice(name, begin, end, per_rank - (end - begin)))
    return slices


def holds(slices: Sequence[SavedSlice], wanted: Wanted) -> bool:
    """Return whether these slices hold any wanted element."""
    return any(_overlap(each.name, each.begin, each.end, wanted) for each in slices)


def read_saved(
    file: TensorFile, tensors: Sequence[torch.Tensor], slices: Sequence[SavedSlice], wanted: Wanted, put: Put
) -> None:
    """Read fp32 tensors that hold these slices in order, and pass the wanted elements to ``put``.

    The tensors are read completely, because their checksums cover all elements.

    Raises:
        CheckpointError: The file is damaged. Elements before the damage have already been passed to ``put``.
    """
    stream = file.stream(tensors)
    largest = max((each.end - each.begin + each.padding for each in slices), default=0)
    buffer = np.empty(min(WINDOW_NUMEL, largest), np.float32)
    for each in slices:
        for begin, end in windows(each.begin, each.end + each.padding):
            values = buffer[: end - begin]
            stream.read(values)
            overlap = _overlap(each.name, begin, min(end, each.end), wanted)
            if overlap:
                put(each.name, overlap.start, torch.from_numpy(values)[overlap.start - begin : overlap.stop - begin])


class SavedWeights(ABC):
    """A folder with the files ``zero_pp_rank_<rank>_mp_rank_00_model_states.pt`` that DeepSpeed saves with ZeRO-3.

    Files are opened when they are first used, and tensors are mapped, not loaded. All methods and properties raise
    :class:`CheckpointError` if a file is missing or damaged.

    Args:
        path: Path of the folder.
        rank: Rank whose model states to read.
        world_size: Present number of processes. If another number saved the checkpoint, all read the model states of
            rank 0.
        num_saved: Number of processes that saved the checkpoint; None: the number of files.
        parts: Further folders with files of the same save, from other machines.
    """

    remedy: str

    def __init__(
        self, path: Path, *, rank: int, world_size: int, num_saved: int | None = None, parts: Sequence[Path] = ()
    ) -> None:
        self.path = path
        self._folder_of: dict[str, Path] = {}
        for part in parts:
            self._add(part)
        if num_saved is None:
            num_saved = sum(len(listed(folder, _MODEL_FILES)) for folder in (path, *parts))
        self.num_saved = num_saved
        self._first_states: SavedState | None = None
        self._fragments: dict[int, Mapping[str, torch.Tensor]] = {}
        self._rank = rank if self.num_saved == world_size else 0

    @cached_property
    def model_states(self) -> SavedState:
        """The rank's saved states other than the optimizer's: buffers, shapes, Lightning's state."""
        states = self.model_states_of(self._rank)
        if states["dp_world_size"] != self.num_saved:
            raise CheckpointError(
                f"{self.path} holds the model states of {self.num_saved} processes; {states['dp_world_size']} saved "
                "the checkpoint.",
                f"{self.remedy} If each machine saved its own part, put the parts of all together.",
            )
        return states

    @property
    def in_parts(self) -> bool:
        """Whether the folder may lack files of other processes, so that this process may read only its own."""
        return self._first_states is not None

    def states_for_others(self) -> SavedState:
        """Return the part of this process's model states that processes need that do not see its file."""
        states = self.model_states
        module = read_mapped(states["module"], self.path)
        return {"module": module, **{key: states[key] for key in ("shared_params", SAVE_ID) if key in states}}

    def take_first_states(self, states: SavedState) -> None:
        """Set the first process's :meth:`states_for_others`, because this process may not see its file."""
        self._first_states = states

    @cached_property
    def _first_model_states(self) -> SavedState:
        if self._first_states is not None:
            return self._first_states
        return self.model_states if self._rank == 0 else self.model_states_of(0)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every trained parameter, in the order of the optimizer's files."""
        saved = {name: shape for shapes in self.model_states[PARAM_SHAPES] for name, shape in shapes.items()}
        for name in saved:
            # The name becomes a path in universal checkpoints. No torch module has parameters with such names.
            if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
                raise CheckpointError(f"{self.path} names a parameter {name!r}.", self.remedy)
        return self._checked_shapes(saved)

    def model_states_of(self, rank: int) -> SavedState:
        """Return a process's saved states other than the optimizer's."""
        states: SavedState = self._load(self.model_file(rank))
        if not isinstance(states, dict):
            raise CheckpointError(
                f"{self.model_file(rank)} is damaged: it holds a {type(states).__name__}, not the states of a process.",
                self.remedy,
            )
        require_rank(states.get(RANK_KEY), rank, self.model_file(rank))
        return states

    def require_one_save(self) -> None:
        """Raise if the files come from different saves, such as those of a folder that was copied by hand."""
        if len({self.model_states_of(rank).get(SAVE_ID) for rank in range(self.num_saved)}) > 1:
            raise self._different_saves()

    def _different_saves(self) -> CheckpointError:
        return CheckpointError(
            f"The files of {self.path} come from different saves.",
            "Copy checkpoints as whole folders, or use another one.",
        )

    def frozen_shapes(self) -> dict[str, torch.Size] | None:
        """Return the shape of every untrained parameter, or None if these were not saved."""
        shapes = self.model_states.get(FROZEN_PARAM_SHAPES)
        return None if shapes is None else self._checked_shapes(dict(shapes))

    def _checked_shapes(self, shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
        for name, shape in shapes.items():
            if not isinstance(shape, torch.Size):
                raise CheckpointError(f"{self.path} says that {name!r} has the shape {shape!r}.", self.remedy)
        return shapes

    @property
    def shared(self) -> dict[str, str]:
        """Aliases of parameters, each mapped to the name under which the parameter is saved."""
        # Only the first rank saves aliases.
        return dict(self._first_model_states["shared_params"])

    @property
    def module(self) -> SavedState:
        """The module's state dict: buffers, and empty placeholders for parameters."""
        return read_mapped(self.model_states["module"], self.path)

    def frozen(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return elements ``[begin, end)`` of an untrained parameter, flattened."""
        numel = max(1, self._frozen_fragments(self._rank)[name].numel())  # the same for all processes
        slices = [
            self._frozen_fragments(rank)[name].detach().flatten()[max(0, begin - rank * numel) : end - rank * numel]
            for rank in range(begin // numel, max(begin // numel + 1, -(-end // numel)))
        ]
        return limited("Reading", self.path, torch.cat, slices)

    @abstractmethod
    def require_whole(self) -> None:
        """Raise if files are missing or do not belong together, as far as can be checked without reading them all."""

    @abstractmethod
    def read_masters(self, wanted: Wanted, put: Put) -> None:
        """Pass fp32 values of trained parameters to ``put``, and verify the checksums of the values read."""

    def read_frozen(self, wanted: Wanted, put: Put) -> None:
        """Pass values of untrained parameters to ``put``, in their saved dtype."""
        for name in self.frozen_shapes() or {}:
            elements = wanted.get(name, range(0))
            for begin, end in windows(elements.start, elements.stop):
                put(name, begin, self.frozen(name, begin, end))

    def _frozen_fragments(self, rank: int) -> Mapping[str, torch.Tensor]:
        if rank not in self._fragments:
            states = self.model_states if rank == self._rank else self.model_states_of(rank)
            self._fragments[rank] = states[FROZEN_PARAM_FRAGMENTS]
        return self._fragments[rank]

    def model_file(self, rank: int) -> Path:
        """Return the path of the model states that a process saved."""
        return self.file(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")

    def file(self, name: str) -> Path:
        """Return the path of a file of this name, in the folder or in a part."""
        return self._folder_of.get(name, self.path) / name

    def _add(self, part: Path) -> None:
        for name in limited("Reading", part, os.listdir, part):
            other = self.file(name)
            if _PART.search(name) and limited("Looking at", other, other.exists):
                raise CheckpointError(
                    f"{part / name} is in {other.parent}, too: each part has the files of other processes.",
                    "Name the folder of each machine once.",
                )
            self._folder_of[name] = part

    def _absent(self, file: Path) -> CheckpointError:
        return CheckpointError(f"The checkpoint {self.path} has no file {file}.", self.remedy)

    def _load(self, file: Path) -> Pickled:
        if not limited("Looking at", file, file.is_file):
            raise self._absent(file)
        try:
            return load_file(file, map_location="cpu", mmap=True)
        except CheckpointError:
            raise
        except PermissionError as error:
            raise refused(file, error) from error
        except DAMAGE as error:
            raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}.", self.remedy) from error


def windows(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most :data:`WINDOW_NUMEL` elements, in order."""
    for first in range(begin, end, WINDOW_NUMEL):
        yield first, min(first + WINDOW_NUMEL, end)


def _overlap(name: str, begin: int, end: int, wanted: Wanted) -> range:
    elements = wanted.get(name, range(0))
    return range(max(begin, elements.start), min(end, elements.stop))


def require_rank(saved_by: int | None, rank: int, file: Path) -> None:
    """Check that the rank in a file's name saved it.

    Args:
        saved_by: The rank that saved the file; None: unknown, as in checkpoints of stock DeepSpeed and older versions.
        rank: The rank in the file's name.
        file: Path of the file, for the error.

    Raises:
        CheckpointError: Another rank saved the file, with another part of the parameters.
    """
    if saved_by is not None and saved_by != rank:
        raise CheckpointError(
            f"{file} was saved by rank {saved_by} under another name.",
            "Copy checkpoints as whole folders, with the names of their files, or use another one.",
        )
