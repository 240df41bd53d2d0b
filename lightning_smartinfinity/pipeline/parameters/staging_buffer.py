"""The host buffer through which parameters are copied that the native core cannot reach."""

from __future__ import annotations

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.batches import DTYPE_BYTES
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import HostTensor

__all__ = ["StagingBuffer"]

_TORCH_DTYPES = {
    native.DType.FLOAT32: torch.float32,
    native.DType.FLOAT16: torch.float16,
    native.DType.BFLOAT16: torch.bfloat16,
}
_FEWEST_ROWS = 2


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
