"""A rank's parameters: in host memory, in a CUDA device's memory, or where the native core cannot reach them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.batches import FlatMemory, Link
from lightning_smartinfinity.pipeline.layout.tensors import Flat, native_dtype
from lightning_smartinfinity.pipeline.parameters.staged_submission import StagedMemory, StagedSubmission
from lightning_smartinfinity.pipeline.parameters.staging_buffer import StagingBuffer
from lightning_smartinfinity.pipeline.parameters.submissions import Assignment, DirectSubmission, Submission

__all__ = ["CudaPartition", "HostPartition", "ParameterMemory", "StagedPartition", "StagingMaker", "TensorPartition"]

StagingMaker = Callable[[native.DType], StagingBuffer]
"""Returns the staging buffer of a store for parameters of this dtype."""


class ParameterMemory(ABC):
    """A rank's parameters in memory. A step updates them, and the first state is computed from them.

    Attributes:
        waits_per_stream: Whether a wait for parameters orders only the stream that is current during the wait.
        allows_incremental: Whether a step may begin before all of its tasklets are known.
    """

    waits_per_stream: ClassVar[bool] = False
    allows_incremental: ClassVar[bool] = True

    @abstractmethod
    def submission(self, assignment: Assignment, staging: StagingMaker) -> Submission:
        """Prepare work on these parameters; nothing has started on return.

        Args:
            assignment: The work.
            staging: Returns the staging buffer; called if the native core cannot reach the parameters.
        """


@dataclass(frozen=True)
class HostPartition(ParameterMemory):
    """Parameters in host memory.

    Args:
        flats: The memory of each sub-group, in sub-group order.
    """

    flats: Sequence[Flat]

    def submission(self, assignment: Assignment, staging: StagingMaker) -> DirectSubmission:
        memory = FlatMemory(assignment.layout, self.flats)
        return DirectSubmission(assignment.device, partial(assignment.make_batch, memory), assignment.tasklets)


@dataclass(frozen=True)
class CudaPartition(ParameterMemory):
    """Parameters in the memory of a CUDA device: the native core copies each tasklet as soon as it is updated.

    Args:
        flats: The device memory of each sub-group, in sub-group order.
        link: The link to the user of the device.
    """

    flats: Sequence[Flat]
    link: Link

    # When a wait returns, copies to the device may still be in flight, so every stream that reads parameters must wait.
    waits_per_stream: ClassVar[bool] = True

    def submission(self, assignment: Assignment, staging: StagingMaker) -> DirectSubmission:
        memory = FlatMemory(assignment.layout, self.flats, link=self.link)
        make_parts = partial(assignment.make_batch, memory)
        return DirectSubmission(assignment.device, make_parts, assignment.tasklets, link=self.link)


class StagedPartition(StagedMemory, ParameterMemory):
    """Parameters that are copied through a small host buffer.

    :class:`TensorPartition` holds torch tensors on any device; ``zero3.parameters.partition`` holds parameters on
    storage, and its methods may raise a StorageError.
    """

    def submission(self, assignment: Assignment, staging: StagingMaker) -> StagedSubmission:
        return StagedSubmission(assignment, self, staging(self.dtype))


class TensorPartition(StagedPartition):
    """One flat tensor per sub-group. Copies block: use it only for memory without a faster path.

    Copies to a CUDA device run on the stream that is current when this object is created.

    Args:
        tensors: At least one flat, contiguous tensor on any device, in sub-group order; all of one dtype.
    """

    allows_incremental: ClassVar[bool] = False  # within backward, a device may still use the old parameters

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        assert len({tensor.dtype for tensor in tensors}) == 1, "one dtype"
        self.dtype = native_dtype(tensors[0].dtype)
        self._tensors = [tensor.detach() for tensor in tensors]
        device = tensors[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._range(sub_group, offset, values).copy_(values)

    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            values.copy_(self._range(sub_group, offset, values))

    def synchronize(self) -> None:
        """Return at once: every copy has completed."""

    def _range(self, sub_group: int, offset: int, values: torch.Tensor) -> torch.Tensor:
        return self._tensors[sub_group][offset : offset + values.numel()]
