"""Parameters that the native core cannot reach, and the host buffer through which they are copied."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.batches import DTYPE_BYTES
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import HostTensor, native_dtype
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory, StagingMaker
from lightning_smartinfinity.pipeline.parameters.staged_submission import StagedSubmission
from lightning_smartinfinity.pipeline.parameters.submissions import Assignment

__all__ = ["StagedPartition", "StagingBuffer", "TensorPartition"]

_TORCH_DTYPES = {
    native.DType.FLOAT32: torch.float32,
    native.DType.FLOAT16: torch.float16,
    native.DType.BFLOAT16: torch.bfloat16,
}
_FEWEST_ROWS = 2


class StagedPartition(ParameterMemory):
    """Parameters that only their owner can reach. They are copied through a small host buffer.

    :class:`TensorPartition` holds torch tensors on any device; ``zero3.parameters.stored_partition`` holds parameters
    on storage, and its methods may raise a StorageError. One thread, other than the training's, calls all of these
    methods.

    Attributes:
        dtype: The parameters' dtype.
    """

    dtype: native.DType

    @abstractmethod
    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        """Start copying ``values``, which may change on return, to elements from ``offset`` on of a sub-group."""

    @abstractmethod
    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        """Start copying these elements of a sub-group into ``values``, which is filled after :meth:`synchronize`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every copy started so far has completed."""

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


class StagingBuffer:
    """Host memory with rows of one tasklet each.

    Args:
        layout: The partition.
        dtype: The parameters' dtype.
        nbytes: Upper bound of all rows together, unless two rows need more.
    """

    def __init__(self, layout: PartitionLayout, *, dtype: native.DType, nbytes: int) -> None:
        self.dtype = dtype
        self._numel = layout.extents.tasklet_numel
        bound = nbytes // max(1, self._numel * DTYPE_BYTES[dtype])
        self.num_rows = max(1, min(max(_FEWEST_ROWS, bound), layout.extents.num_tasklets))
        self._memory = HostTensor(self.num_rows * self._numel, _TORCH_DTYPES[dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._memory.tensor.nbytes

    def row(self, index: int) -> torch.Tensor:
        """Return the memory of one row."""
        return self._memory.tensor[index * self._numel : (index + 1) * self._numel]
