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

    from lightning_smartinfinity.transfer.compressed_gradients import CompressedGradients

__all__ = ["CudaPartition", "Flat", "StagedPartition", "StepPlan"]


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


class Link(Protocol):
    """What a step asks about a CUDA device's user; ``transfer.cuda.CudaLink`` answers for torch."""

    def current_stream(self) -> int:
        """Handle of the stream that the user gives its work to now."""

    def warn_of_unregistered(self) -> None:
        """Warn, once, if host memory could not be registered."""


@dataclass(frozen=True)
class CudaPartition:
    """Parameters in the memory of a CUDA device: the native core copies each tasklet's as soon as it is computed.

    Args:
        flats: Of each sub-group, in device memory, in sub-group order.
        stream: What they travel on.
        link: To the user of the device.
    """

    flats: Sequence[Flat]
    stream: native.CudaStream
    link: Link

    def take(self) -> None:
        """Let copies from now on run after what the user's stream was given so far."""
        self.stream.follow(self.link.current_stream())

    def give(self) -> None:
        """Let what the user's stream is given from now on run after the copies started so far."""
        self.stream.lead(self.link.current_stream())


class StagedPartition(Protocol):
    """Parameters that only their owner can reach: they travel through a small host buffer, wave by wave.

    ``transfer.staging.TensorPartition`` implements it for torch tensors on any device, by copies that block,
    ``zero3.parameters.stored_partition`` for parameters on storage, whose methods may raise a StorageError.
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
        outputs: Host memory of each sub-group's parameters, a :class:`CudaPartition` or a :class:`StagedPartition`.
            Parameters in host or CUDA memory that have the state format's ``parameter_dtype`` are the master weights,
            or their upper halves: a step updates what lies there when it begins.
        groups: The optimizer's ``param_groups``, read once when the step begins.
        gradient_scale: Factor on every gradient before the update: one over the combined loss and clipping scale.
        compressed: Where gradients are compressed to; None: they reach the update as they are.
        loss_scale: Of the gradients, which a residual does not have.
        first_uses: int64[num_parameters]: tasklets are worked in the order of the least of these numbers among their
            parameters; None: in partition order. It changes no result.
    """

    active: NDArray[np.bool_]
    gradients: Sequence[Flat]
    outputs: Sequence[Flat] | CudaPartition | StagedPartition
    groups: Sequence[Mapping[str, Any]]
    gradient_scale: float = 1.0
    compressed: CompressedGradients | None = None
    loss_scale: float = 1.0
    first_uses: NDArray[np.int64] | None = None
