"""What DeepSpeed's ``ds_to_universal`` makes of a ZeRO-3 checkpoint: whole parameters, each in files of its own.

::

    <folder>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    flat, without padding
    <folder>/zero/optimizer_state.pt                                the first rank's optimizer file
    <folder>/zero_pp_rank_<rank>_mp_rank_00_model_states.pt         as every rank saved it

Nothing is read before it is asked for: tensors are mapped, not loaded. Mapping verifies nothing; the ``check_`` methods
read the files through, each file on one rank, and compare with the CRC-32s that ``torch.save`` keeps.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
)

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoint import EXTRA_KEY
from lightning_smartinfinity.zero3.collectives import gather
from lightning_smartinfinity.zero3.tensor_file import check_records

__all__ = ["MASTER_FILE", "UniversalFolder", "is_universal"]

MASTER_FILE = "fp32"
_CONVERT_AGAIN = "Convert the checkpoint again."


def is_universal(path: str | Path) -> bool:
    """Whether a folder is a universal checkpoint; all ranks ask, and agree."""
    # os.path, unlike Path, raises nothing where a folder cannot be looked into: a rank must not leave the others here.
    return any(gather(os.path.isdir(Path(path) / "zero"), None))


class UniversalFolder:
    """Reads a universal checkpoint. Everything raises :class:`CheckpointError` where a file is missing or damaged.

    Args:
        path: The folder.
        rank: Whose model states are wanted.
        world_size: Number of processes now; if as many saved the checkpoint, each finds its own.
    """

    def __init__(self, path: Path, *, rank: int, world_size: int) -> None:
        self.path = path
        self._model_files = sorted(path.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"))
        self.num_saved = len(self._model_files)
        self._rank = rank if self.num_saved == world_size else 0
        self._share = slice(rank, None, world_size)

    def check_states(self, *, with_optimizer: bool) -> None:
        """Verify this rank's share of what is no array of a trainable parameter.

        Args:
            with_optimizer: Whether :attr:`optimizer_states` will be asked for.
        """
        self._check(self._model_files, tensors=True)
        if with_optimizer:
            self._check([self.path / "zero" / "optimizer_state.pt"], tensors=False)

    def check_arrays(self, names: Iterable[str]) -> None:
        """Verify this rank's share of the arrays of trainable parameters: ``fp32``, ``exp_avg`` or ``exp_avg_sq``."""
        self._check(sorted(file for name in names for file in self.path.glob(f"zero/*/{name}.pt")), tensors=True)

    def _check(self, files: list[Path], *, tensors: bool) -> None:
        for file in files[self._share]:
            if file.is_file():  # a missing one is named when it is asked for
                check_records(file, tensors=tensors, remedy=_CONVERT_AGAIN)

    @cached_property
    def model_states(self) -> Mapping[str, Any]:
        """What the rank saved beside the optimizer's state: buffers, shapes, Lightning's state."""
        states: Mapping[str, Any] = self._load(self._model_file(self._rank), mmap=False)
        if states["dp_world_size"] != self.num_saved:
            raise CheckpointError(
                f"{self.path} holds the model states of {self.num_saved} processes; {states['dp_world_size']} saved "
                "the checkpoint.",
                _CONVERT_AGAIN,
            )
        return states

    @cached_property
    def optimizer_states(self) -> Mapping[str, Any]:
        """The optimizer file of the first rank; its flat tensors are of no use here."""
        states: Mapping[str, Any] = self._load(self.path / "zero" / "optimizer_state.pt", mmap=True)
        return states

    @property
    def extra(self) -> Mapping[str, Any] | None:
        """What this strategy saved beyond DeepSpeed's own format; None if stock DeepSpeed saved the checkpoint."""
        return self.optimizer_states.get(EXTRA_KEY)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every trainable parameter."""
        return {name: shape for of_group in self.model_states[PARAM_SHAPES] for name, shape in of_group.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, whose ``params`` are names."""
        names = [list(of_sub_group) for of_sub_group in self.model_states[PARAM_SHAPES]]
        return [
            {**group, "params": [name for sub_group in group["params"] for name in names[sub_group]]}
            for group in self.optimizer_states[OPTIMIZER_STATE_DICT]["param_groups"]
        ]

    @property
    def steps(self) -> dict[str, int]:
        """Number of updates of every trainable parameter. Stock DeepSpeed counts them per sub-group."""
        if self.extra is not None:
            names = [name for name, *_ in self.extra["parameters"]]
            return dict(zip(names, self.extra["steps"], strict=True))
        states = self.optimizer_states[OPTIMIZER_STATE_DICT]["state"]
        return {
            name: int(states[sub_group]["step"])
            for sub_group, of_sub_group in enumerate(self.model_states[PARAM_SHAPES])
            for name in of_sub_group
        }

    @property
    def shared(self) -> dict[str, str]:
        """Other names of parameters, each with the one that the parameter is saved by."""
        # Only the first rank saves them.
        return dict(self._load(self._model_file(0), mmap=True)["shared_params"])

    def tensor(self, name: str, array: str, *, numel: int) -> torch.Tensor:
        """One flat fp32 array of one parameter, mapped from its file.

        Args:
            name: Of the parameter.
            array: ``fp32``, ``exp_avg`` or ``exp_avg_sq``.
            numel: Elements that it has to have.
        """
        file = self.path / "zero" / name / f"{array}.pt"
        tensor = self._load(file, mmap=True)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.numel()) != (torch.float32, numel):
            raise CheckpointError(f"{file} does not hold {numel} elements of float32.", _CONVERT_AGAIN)
        return tensor.detach().flatten()

    def frozen_shapes(self) -> dict[str, torch.Size] | None:
        """Shape of every parameter that was not trained; None if they were not saved."""
        shapes = self.model_states.get(FROZEN_PARAM_SHAPES)
        return None if shapes is None else dict(shapes)

    @cached_property
    def _frozen_fragments(self) -> list[Mapping[str, torch.Tensor]]:
        return [self._load(self._model_file(rank), mmap=True)[FROZEN_PARAM_FRAGMENTS] for rank in range(self.num_saved)]

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

    def _model_file(self, rank: int) -> Path:
        return self.path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"

    def _load(self, file: Path, *, mmap: bool) -> Any:
        if not file.is_file():
            raise CheckpointError(f"The universal checkpoint {self.path} has no file {file}.", _CONVERT_AGAIN)
        try:
            # As trusted as every checkpoint of Lightning's or DeepSpeed's, which hold pickled objects.
            return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False)
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}.", _CONVERT_AGAIN) from error
