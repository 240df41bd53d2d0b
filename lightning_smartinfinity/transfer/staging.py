"""Moves parameters of partitions outside host memory through a bounded host buffer, wave by wave."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.transfer.batches import DTYPE_BYTES, Piece, pieces_within
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.partitions import ParameterMemory, StagingMaker
from lightning_smartinfinity.transfer.submissions import Assignment, Direction, DirectSubmission, Submission
from lightning_smartinfinity.transfer.tensors import HostTensor, native_dtype

__all__ = ["StagedPartition", "StagingBuffer", "TensorPartition"]

_TORCH_DTYPES = {
    native.DType.FLOAT32: torch.float32,
    native.DType.FLOAT16: torch.float16,
    native.DType.BFLOAT16: torch.bfloat16,
}
_NUM_HALVES = 2


class StagedPartition(ParameterMemory):
    """Parameters that only their owner can reach: they travel through a small host buffer, wave by wave.

    :class:`TensorPartition` holds torch tensors on any device; ``zero3.parameters.stored_partition`` holds parameters
    on storage, and its methods may raise a StorageError.

    Attributes:
        dtype: The parameters' dtype.
    """

    dtype: native.DType
    allows_incremental: ClassVar[bool] = False

    @abstractmethod
    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        """Start copying ``values`` to elements ``[offset, offset + len(values))`` of a sub-group."""

    @abstractmethod
    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        """Start copying these elements of a sub-group into ``values``."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when every copy started so far has completed."""

    def submission(self, assignment: Assignment, staging: StagingMaker) -> StagedSubmission:
        return StagedSubmission(assignment, self, staging(self.dtype))


class TensorPartition(StagedPartition):
    """One flat tensor per sub-group. Copies block: this is for memory that nothing faster can reach.

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
        """Return at once: every copy has completed."""

    def _range(self, sub_group: int, offset: int, values: torch.Tensor) -> torch.Tensor:
        return self._tensors[sub_group][offset : offset + values.numel()]


class StagingBuffer:
    """Two halves of host memory: one is filled by a wave while the other is copied to the partition.

    Args:
        layout: The partition.
        dtype: The parameters' dtype.
        nbytes: Upper bound of both halves together; each holds at least one tasklet.
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
        """Bytes of both halves."""
        return self._memory.tensor.nbytes

    def half(self, index: int) -> torch.Tensor:
        """Return the half that wave number ``index`` uses."""
        begin = index % _NUM_HALVES * self._half_numel
        return self._memory.tensor[begin : begin + self._half_numel]


class _Wave:
    """Parameters of some tasklets in a half of the staging buffer, one tasklet after the other.

    It is a :class:`~lightning_smartinfinity.transfer.batches.Memory`.

    Args:
        layout: The partition.
        tasklets: The wave's tasklets.
        half: The half of the buffer, from :meth:`StagingBuffer.half`.
    """

    def __init__(self, layout: PartitionLayout, tasklets: Sequence[int], half: torch.Tensor) -> None:
        self.tasklets = tasklets
        self.dtype = native_dtype(half.dtype)
        self.stream = None
        self.keeps_parameters = False
        self._layout = layout
        self._half = half
        self._rows = {tasklet: row for row, tasklet in enumerate(tasklets)}

    def address(self, piece: Piece) -> int:
        return self._half.data_ptr() + self._position(piece) * self._half.element_size()

    def ready(self) -> Sequence[native.CudaEvent]:
        return ()

    def put(self, pieces: Sequence[Piece], partition: StagedPartition) -> None:
        """Start copying the pieces that lie in the wave and were updated to the partition."""
        for piece in self._pieces_here(pieces):
            if piece.key >= 0:
                partition.put(piece.sub_group, self._offset(piece), self._values(piece))

    def get(self, pieces: Sequence[Piece], partition: StagedPartition) -> None:
        """Start copying the pieces that lie in the wave from the partition."""
        for piece in self._pieces_here(pieces):
            partition.get(piece.sub_group, self._offset(piece), self._values(piece))

    def _pieces_here(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces_within(pieces, self.tasklets) if piece.tasklet in self._rows]

    def _offset(self, piece: Piece) -> int:
        return piece.begin - self._layout.sub_groups[piece.sub_group].offset

    def _values(self, piece: Piece) -> torch.Tensor:
        position = self._position(piece)
        return self._half[position : position + piece.end - piece.begin]

    def _position(self, piece: Piece) -> int:
        numel = self._layout.extents.tasklet_numel
        return self._rows[piece.tasklet] * numel + piece.begin - piece.tasklet * numel


class StagedSubmission(Submission):
    """Sends wave after wave through the two halves of the staging buffer.

    The caller's waits drive it: they copy a wave to the partition and start the next one. While a wave is in progress,
    the parameters of the wave before travel to the partition. After an interrupt the next wait continues, unless a
    wave was being submitted: then it is unknown whether the device has it.

    Args:
        assignment: The work.
        partition: The parameters' partition.
        staging: The buffer.
    """

    def __init__(self, assignment: Assignment, partition: StagedPartition, staging: StagingBuffer) -> None:
        self._device = assignment.device
        self._make_batch = assignment.make_batch
        self._pieces = assignment.pieces
        self._loads = assignment.direction is Direction.FROM_PARTITION
        self._partition = partition
        tasklets, size = assignment.tasklets, staging.tasklets_per_wave
        self._waves = [
            _Wave(assignment.layout, tasklets[begin : begin + size], staging.half(number))
            for number, begin in enumerate(range(0, len(tasklets), size))
        ]
        self._wave_of = {tasklet: number for number, wave in enumerate(self._waves) for tasklet in wave.tasklets}
        self._num_begun = 0
        self._num_finished = 0
        self._current: DirectSubmission | None = None  # the wave started last
        self._is_submitted = True

    def start(self) -> None:
        self._begin_next()

    def wait(self, tasklets: Sequence[int]) -> None:
        last = max((self._wave_of[tasklet] for tasklet in tasklets if tasklet in self._wave_of), default=-1)
        self._finish_waves(last + 1)

    def finish(self) -> None:
        self._finish_waves(len(self._waves))

    def stop(self) -> None:
        if self._current is not None:
            self._current.stop()
        self._current = None
        with suppress(SmartInfinityError):  # the caller knows the error already, or does not need the result
            self._partition.synchronize()

    def _finish_waves(self, count: int) -> None:
        """Return when the first ``count`` waves are done and their parameters are in the partition."""
        while self._num_finished < count:
            if not self._is_submitted:
                raise StorageError("An interrupt came while a part of the step began.", "Roll it back.")
            self._finish_wave(self._waves[self._num_finished])
        self._partition.synchronize()

    def _finish_wave(self, wave: _Wave) -> None:
        if self._num_begun == self._num_finished + 1:
            assert self._current is not None
            self._current.finish()
            # The next wave overwrites the other half, whose copies ran while this wave was in progress.
            self._partition.synchronize()
            self._begin_next()
        if not self._loads:
            wave.put(self._pieces, self._partition)
        self._num_finished += 1

    def _begin_next(self) -> None:
        if self._num_begun == len(self._waves):
            return
        wave = self._waves[self._num_begun]
        if self._loads:
            wave.get(self._pieces, self._partition)
            self._partition.synchronize()
        submission = DirectSubmission(self._device, partial(self._make_batch, wave), wave.tasklets)
        self._is_submitted = False
        self._current = submission
        self._num_begun += 1
        submission.start()
        self._is_submitted = True
