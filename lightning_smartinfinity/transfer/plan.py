"""What one step is told: plain data, no torch. Memory crosses as integer addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Flat", "StagedPartition", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Flat:
    """One sub-group's contiguous host memory. The caller keeps it alive for as long as it is in use.

    Args:
        address: Of the first element.
        numel: Number of elements.
        dtype: Of the elements.
    """

    address: int
    numel: int
    dtype: native.DType


class StagedPartition(Protocol):
    """Parameters that are not in host memory: they travel through a small host buffer, wave by wave.

    ``transfer.staging.TensorPartition`` implements it for torch tensors on any device, ``zero3.stored_partition`` for
    parameters on storage, whose methods may raise a StorageError.
    """

    dtype: native.DType

    def put(self, sub_group: int, offset: int, values: Tensor) -> None:
        """Start copying ``values`` to elements ``[offset, offset + len(values))`` of a sub-group."""

    def get(self, sub_group: int, offset: int, values: Tensor) -> None:
        """Start copying these elements of a sub-group into ``values``."""

    def synchronize(self) -> None:
        """Return when every copy started so far has completed."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step.

    Args:
        active: bool[num_parameters]: which parameters have a gradient; the others are left as they are, as in torch.
        gradients: Host memory of each sub-group's gradients, in sub-group order (``GradientArena.flats()``).
        outputs: Host memory of each sub-group's parameters, or a :class:`StagedPartition`. fp32 parameters in host
            memory are the master weights: what lies there when the step begins is what is updated.
        groups: The optimizer's ``param_groups``, read once when the step begins.
        gradient_scale: Factor on every gradient before the update: one over the combined loss and clipping scale.
    """

    active: NDArray[np.bool_]
    gradients: Sequence[Flat]
    outputs: Sequence[Flat] | StagedPartition
    groups: Sequence[Mapping[str, Any]]
    gradient_scale: float = 1.0
