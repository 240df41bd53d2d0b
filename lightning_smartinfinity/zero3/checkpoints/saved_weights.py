"""The weights in a checkpoint folder: what they are called, and their values, read window by window."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES, PARAM_SHAPES

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.tensor_file import TensorFile
from lightning_smartinfinity.zero3.untyped import Pickled, SavedState

__all__ = ["WINDOW_NUMEL", "Piece", "Put", "SavedWeights", "Wanted", "pieces_of", "read_pieces", "reaches", "windows"]

WINDOW_NUMEL = 1 << 22
"""Most elements that are in memory at once."""

Wanted = Mapping[str, range]
"""Which elements of which parameters are to be read, counted in the flat, whole parameter."""

Put = Callable[[str, int, torch.Tensor], None]
"""Takes the name of a parameter, the first of some consecutive elements of it, and their values.

The values lie in host memory that is used again: copy what is to be kept.
"""


class Piece(NamedTuple):
    """The elements of a parameter that one process saved.

    Args:
        name: Of the parameter.
        begin: The first element, in the whole parameter.
        end: One past the last.
        padding: Elements without meaning that lie behind them in the file.
    """

    name: str
    begin: int
    end: int
    padding: int


def pieces_of(shapes: Mapping[str, torch.Size], *, rank: int, world_size: int) -> list[Piece]:
    """What one process saves of parameters: ZeRO-3's slices, as long on every process."""
    pieces = []
    for name, shape in shapes.items():
        numel = shape.numel()
        per_rank = -(-numel // world_size)
        begin, end = (min(edge * per_rank, numel) for edge in (rank, rank + 1))
        pieces.append(Piece(name, begin, end, per_rank - (end - begin)))
    return pieces


def reaches(pieces: Sequence[Piece], wanted: Wanted) -> bool:
    """Whether anything wanted lies in these pieces."""
    return any(_overlap(piece.name, piece.begin, piece.end, wanted) for piece in pieces)


def read_pieces(
    file: TensorFile, tensors: Sequence[torch.Tensor], pieces: Sequence[Piece], wanted: Wanted, put: Put
) -> None:
    """Read fp32 tensors that hold some pieces, one behind the other, and hand over what is wanted of them.

    All of it is read, since its checksums cover all of it.

    Raises:
        CheckpointError: The file has been damaged; what lies before the damage has been handed over by then.
    """
    stream = file.stream(tensors)
    largest = max((piece.end - piece.begin + piece.padding for piece in pieces), default=0)
    buffer = np.empty(min(WINDOW_NUMEL, largest), np.float32)
    for piece in pieces:
        for begin, end in windows(piece.begin, piece.end + piece.padding):
            values = buffer[: end - begin]
            stream.read(values)
            overlap = _overlap(piece.name, begin, min(end, piece.end), wanted)
            if overlap:
                put(piece.name, overlap.start, torch.from_numpy(values)[overlap.start - begin : overlap.stop - begin])


class SavedWeights(ABC):
    """A folder with the files ``zero_pp_rank_<rank>_mp_rank_00_model_states.pt`` that DeepSpeed saves with ZeRO-3.

    Nothing is read before it is asked for, and tensors are mapped, not loaded. Everything raises
    :class:`CheckpointError` where a file is missing or damaged.

    Args:
        path: The folder.
        rank: Whose model states are wanted.
        world_size: Number of processes now; if as many saved the checkpoint, each finds its own.
    """

    remedy: str

    def __init__(self, path: Path, *, rank: int, world_size: int) -> None:
        self.path = path
        self.num_saved = len(list(path.glob("zero_pp_rank_*_mp_rank_00_model_states.pt")))
        self._rank = rank if self.num_saved == world_size else 0

    @cached_property
    def model_states(self) -> SavedState:
        """What the rank saved beside the optimizer's state: buffers, shapes, Lightning's state."""
        states = self.model_states_of(self._rank)
        if states["dp_world_size"] != self.num_saved:
            raise CheckpointError(
                f"{self.path} holds the model states of {self.num_saved} processes; {states['dp_world_size']} saved "
                "the checkpoint.",
                self.remedy,
            )
        return states

    @cached_property
    def _first_model_states(self) -> SavedState:
        return self.model_states if self._rank == 0 else self.model_states_of(0)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every trained parameter, in the order in which the files of the optimizer hold them."""
        return {name: shape for of_group in self.model_states[PARAM_SHAPES] for name, shape in of_group.items()}

    def model_states_of(self, rank: int) -> SavedState:
        """What a process saved beside the optimizer's state."""
        states: SavedState = self._load(self.model_file(rank))
        return states

    def frozen_shapes(self) -> dict[str, torch.Size] | None:
        """Shape of every parameter that was not trained; None if they were not saved."""
        shapes = self.model_states.get(FROZEN_PARAM_SHAPES)
        return None if shapes is None else dict(shapes)

    @property
    def shared(self) -> dict[str, str]:
        """Other names of parameters, each with the one that the parameter is saved by."""
        # Only the first rank saves them.
        return dict(self._first_model_states["shared_params"])

    @property
    def module(self) -> SavedState:
        """The module's state dict: buffers, and stand-ins without elements for parameters."""
        module: SavedState = self.model_states["module"]
        return module

    def frozen(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of a parameter that was not trained, flat."""
        fragments = [of_rank[name].detach().flatten() for of_rank in self._frozen_fragments]
        numel = fragments[0].numel()
        return torch.cat(
            [
                fragment[max(0, begin - rank * numel) : max(0, min(numel, end - rank * numel))]
                for rank, fragment in enumerate(fragments)
            ]
        )

    @abstractmethod
    def require_whole(self) -> None:
        """Raise if files are missing or do not belong together, as far as that shows without reading all of them."""

    @abstractmethod
    def read_masters(self, wanted: Wanted, put: Put) -> None:
        """Hand over fp32 values of trained parameters, and verify the checksums of what was read."""

    def read_frozen(self, wanted: Wanted, put: Put) -> None:
        """Hand over values of parameters that were not trained, in the dtype that they were saved in."""
        for name in self.frozen_shapes() or {}:
            elements = wanted.get(name, range(0))
            for begin, end in windows(elements.start, elements.stop):
                put(name, begin, self.frozen(name, begin, end))

    @cached_property
    def _frozen_fragments(self) -> list[Mapping[str, torch.Tensor]]:
        return [self.model_states_of(rank)[FROZEN_PARAM_FRAGMENTS] for rank in range(self.num_saved)]

    def model_file(self, rank: int) -> Path:
        """Where a process saved what is beside the optimizer's state."""
        return self.path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"

    def _load(self, file: Path) -> Pickled:
        if not file.is_file():
            raise CheckpointError(f"The checkpoint {self.path} has no file {file}.", self.remedy)
        try:
            # As trusted as every checkpoint of Lightning's or DeepSpeed's, which hold pickled objects.
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}.", self.remedy) from error


def windows(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most :data:`WINDOW_NUMEL` elements, in order."""
    for first in range(begin, end, WINDOW_NUMEL):
        yield first, min(first + WINDOW_NUMEL, end)


def _overlap(name: str, begin: int, end: int, wanted: Wanted) -> range:
    elements = wanted.get(name, range(0))
    return range(max(begin, elements.start), min(end, elements.stop))
