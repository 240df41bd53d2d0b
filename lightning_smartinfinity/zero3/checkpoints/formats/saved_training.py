"""A training in a checkpoint folder: weights and optimizer state, which is read part by part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping

import numpy as np
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES
from numpy.typing import NDArray

from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import Checksums
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import SavedWeights
from lightning_smartinfinity.zero3.checkpoints.formats.stock_checkpoint import STEP
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["MASTERS", "SavedTraining"]

MASTERS = "fp32"
"""Name of the masters among the arrays of an optimizer."""


class SavedTraining(SavedWeights):
    """A checkpoint from which a training can resume, on any number of processes."""

    @property
    @abstractmethod
    def optimizer_states(self) -> SavedState:
        """The optimizer state that the first process saved; its flat tensors are not used."""

    @abstractmethod
    def check_states(self) -> None:
        """Verify this rank's share of everything but trained parameters' arrays; check that all are of one save."""

    @abstractmethod
    def check_arrays(self, names: Collection[str]) -> Checksums:
        """Check that the arrays of all trained parameters exist, and verify this rank's share of them.

        Args:
            names: Names of the arrays, such as :data:`MASTERS` and ``exp_avg``.

        Returns:
            The block checksums of the verified arrays, for :meth:`begin_reading` on every rank; none if the checkpoint
            itself holds block checksums.
        """

    @abstractmethod
    def begin_reading(self, checksums: Checksums) -> None:
        """Set the checksums that all ranks have computed; call this before the first :meth:`read`."""

    @abstractmethod
    def read(self, name: str, array: str, begin: int, values: NDArray[np.float32]) -> None:
        """Fill ``values`` with consecutive elements of an array of a trained parameter, and verify their checksums.

        Args:
            name: Name of the parameter.
            array: Name of the array.
            begin: Index of the first element in the flat, whole parameter.
            values: Array to fill.
        """

    def close(self) -> None:
        """Close the files that :meth:`read` has opened; idempotent."""

    @property
    def extra(self) -> SavedState | None:
        """Entries that this strategy added to DeepSpeed's format; None if stock DeepSpeed saved the checkpoint."""
        return self.optimizer_states.get(EXTRA_KEY)

    @property
    def param_groups(self) -> list[SavedState]:
        """The optimizer's parameter groups, with names as ``params``."""
        names = [list(shapes) for shapes in self.model_states[PARAM_SHAPES]]
        return [
            {**group, "params": [name for sub_group in group["params"] for name in names[sub_group]]}
            for group in self.optimizer_states[OPTIMIZER_STATE_DICT]["param_groups"]
        ]

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the saved arrays other than the master; empty if the optimizer had no state yet."""
        names = {name for state in self._states_of_sub_groups.values() for name in state}
        return tuple(sorted(names - {STEP}))

    @property
    def _states_of_sub_groups(self) -> Mapping[int, SavedState]:
        states: Mapping[int, SavedState] = self.optimizer_states[OPTIMIZER_STATE_DICT]["state"]
        return states

    @property
    def steps(self) -> dict[str, int]:
        """Number of updates of every trained parameter. Stock DeepSpeed counts them per sub-group, if at all."""
        if self.extra is not None:
            names = [name for name, *_ in self.extra["parameters"]]
            return dict(zip(names, self.extra["steps"], strict=True))
        states = self._states_of_sub_groups
        return {
            # If no count was saved, 1 means that the arrays have been updated.
            name: int(states[sub_group].get(STEP, 1)) if states.get(sub_group) else 0
            for sub_group, shapes in enumerate(self.model_states[PARAM_SHAPES])
            for name in shapes
        }
