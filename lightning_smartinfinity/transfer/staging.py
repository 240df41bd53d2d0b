"""Partitions outside host memory: a bounded host buffer that parameters pass through."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.transfer.batches import DTYPE_BYTES, Piece, pieces_within
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.plan import StagedPartition
from lightning_smartinfinity.transfer.tensors import HostTensor, native_dtype

__all__ = ["StagingBuffer", "TensorPartition", "Wave", "waves_of"]

_TORCH_DTYPES = {
    native.DType.FLOAT32: torch.float32,
    native.DType.FLOAT16: torch.float16,
    native.DType.BFLOAT16: torch.bfloat16,
}
_NUM_HALVES = 2


class TensorPartition:
    """A :class:`~lightning_smartinfinity.transfer.plan.StagedPartition` over one flat tensor per sub-group.

    Copies block: for memory that nothing faster can reach.

    Args:
        tensors: Flat, contiguous, one dtype, in sub-group order; on any device. At least one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        assert len({tensor.dtype for tensor in tensors}) == 1, "one dtype"
        self.dtype = native_dtype(tensors[0].dtype)
        self._tensors = [tensor.detach() for tensor in tensors]

    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        self._range(sub_group, offset, values).copy_(values)

    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        values.copy_(self._range(sub_group, offset, values))

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def _range(self, sub_group: int, offset: int, values: torch.Tensor) -> torch.Tensor:
        return self._tensors[sub_group][offset : offset + values.numel()]


class StagingBuffer:
    """Two halves of host memory: one is filled by a wave while the other is copied to the partition.

    Args:
        layout: The partition.
        dtype: Of the parameters.
        nbytes: Upper bound of both halves together; they hold one tasklet each at least.
    """

    def __init__(self, layout: PartitionLayout, *, dtype: native.DType, nbytes: int) -> None:
        numel = layout.extents.tasklet_numel
        bound = nbytes // (_NUM_HALVES * numel * DTYPE_BYTES[dtype])
        self.dtype = dtype
        self.tasklets_per_wave = max(1, min(bound, layout.extents.num_tasklets))
        self._half_numel = self.tasklets_per_wave * numel
        self._memory = HostTensor(_NUM_HALVES * self._half_numel, _TORCH_DTYPES[dtype])

    @property
    def nbytes(self) -> int:
        """Of both halves."""
        return self._memory.tensor.nbytes

    def half(self, index: int) -> torch.Tensor:
        """The half that wave number ``index`` uses."""
        begin = index % _NUM_HALVES * self._half_numel
        return self._memory.tensor[begin : begin + self._half_numel]


def waves_of(layout: PartitionLayout, tasklets: Sequence[int], staging: StagingBuffer) -> list[Wave]:
    """Deal tasklets, as they come, to waves in alternating halves of the buffer."""
    size = staging.tasklets_per_wave
    return [
        Wave(layout, tasklets[begin : begin + size], staging.half(number))
        for number, begin in enumerate(range(0, len(tasklets), size))
    ]


class Wave:
    """Some tasklets' parameters in a half of the staging buffer, one tasklet behind the other.

    It is a :class:`~lightning_smartinfinity.transfer.batches.Memory`.

    Args:
        layout: The partition.
        tasklets: Those of the wave.
        half: From :meth:`StagingBuffer.half`.
    """

    def __init__(self, layout: PartitionLayout, tasklets: Sequence[int], half: torch.Tensor) -> None:
        self.tasklets = tasklets
        self.dtype = native_dtype(half.dtype)
        self.stream = None
        self._layout = layout
        self._half = half
        self._rows = {tasklet: row for row, tasklet in enumerate(tasklets)}

    def address(self, piece: Piece) -> int:
        return self._half.data_ptr() + self._position(piece) * self._half.element_size()

    def put(self, pieces: Sequence[Piece], partition: StagedPartition) -> None:
        """Start copying those of these pieces that lie in the wave, and were updated, to the partition."""
        for piece in self._own(pieces):
            if piece.key >= 0:
                partition.put(piece.sub_group, self._offset(piece), self._values(piece))

    def get(self, pieces: Sequence[Piece], partition: StagedPartition) -> None:
        """Start copying those of these pieces that lie in the wave from the partition."""
        for piece in self._own(pieces):
            partition.get(piece.sub_group, self._offset(piece), self._values(piece))

    def _own(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces_within(pieces, self.tasklets) if piece.tasklet in self._rows]

    def _offset(self, piece: Piece) -> int:
        return piece.begin - self._layout.sub_groups[piece.sub_group].offset

    def _values(self, piece: Piece) -> torch.Tensor:
        position = self._position(piece)
        return self._half[position : position + piece.end - piece.begin]

    def _position(self, piece: Piece) -> int:
        numel = self._layout.extents.tasklet_numel
        return self._rows[piece.tasklet] * numel + piece.begin - piece.tasklet * numel
