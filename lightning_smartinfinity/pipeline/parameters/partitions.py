"""A rank's parameters: in host memory, in a CUDA device's memory, or where the native core cannot reach them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.batches import FlatMemory, Link
from lightning_smartinfinity.pipeline.layout.tensors import Flat
from lightning_smartinfinity.pipeline.parameters.submissions import Assignment, DirectSubmission, Submission

if TYPE_CHECKING:
    from lightning_smartinfinity.pipeline.parameters.staging_buffer import StagingBuffer

__all__ = ["CudaPartition", "HostPartition", "ParameterMemory", "StagingMaker"]

StagingMaker = Callable[[native.DType], "StagingBuffer"]
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
