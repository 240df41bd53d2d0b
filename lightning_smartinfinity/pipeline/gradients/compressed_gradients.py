"""Memory for compressed gradients, and for the residual, the part that compression leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.common.machine import available_cores
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.gradients.device_selection import DeviceSelection
from lightning_smartinfinity.pipeline.layout.batches import Compression
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import HostTensor, native_dtype
from lightning_smartinfinity.settings import GradientCodec, TopK

__all__ = ["CompressedGradients", "feed_back_threads"]

_BEAT_BYTES = 64
_FP32_BYTES = 4
_MOST_THREADS = 8  # of all processes on a machine: each moves about 15 GB/s, so more would exceed memory's bandwidth


class CompressedGradients:
    """One rank's payloads of compressed gradients, one for each tasklet, and its residual.

    The device compresses each tasklet's gradient just before it updates the tasklet. Payloads are kept until their step
    is committed. Only then does :meth:`feed_back` change the residual, so a step that is skipped, rolled back or
    repeated starts from the same residual.

    Args:
        layout: The partition.
        codec: The codec that the user chose.
        gradients: The arena's flat tensor.
        num_threads: Number of threads of :meth:`feed_back`.
        device: Device on which torch selects elements; None means that the native core selects, just before each
            update.

    Attributes:
        codec: The native core's codec.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        codec: GradientCodec,
        *,
        gradients: torch.Tensor,
        num_threads: int,
        device: torch.device | None = None,
    ) -> None:
        self.codec = codec.native()
        self._num_threads = num_threads
        tasklets = layout.tasklets
        self._sizes = [self.codec.payload_bytes(tasklet.numel, native_dtype(gradients.dtype)) for tasklet in tasklets]
        self._offsets = [0, *accumulate(-(-size // _BEAT_BYTES) * _BEAT_BYTES for size in self._sizes)]
        self._payloads = HostTensor(self._offsets[-1], torch.uint8)
        self._residual = HostTensor(layout.numel, torch.float32) if codec.keeps_residual else None
        self._elements = [tasklet.offset for tasklet in tasklets]
        self._padding = _padding_of(layout)
        self._selection = None
        if device is not None and isinstance(codec, TopK) and codec.exact:
            self._selection = DeviceSelection(codec, device=device, gradients=gradients, residual=self.residual)

    @property
    def residual(self) -> torch.Tensor | None:
        """float32[numel of the partition], unscaled and not clipped; None without error feedback."""
        return None if self._residual is None else self._residual.tensor

    @property
    def payload_bytes(self) -> int:
        """Upper bound of the payloads' host memory: pages use memory only once they have been written."""
        return self._offsets[-1]

    @property
    def residual_bytes(self) -> int:
        """Host memory of the residual."""
        return 0 if self._residual is None else self._residual.tensor.nbytes

    def of(self, tasklet: int) -> Compression:
        """Return the compression of one tasklet of the layout."""
        residual = self.residual
        return Compression(
            payload=self._payloads.tensor.data_ptr() + self._offsets[tasklet],
            payload_bytes=self._sizes[tasklet],
            residual=0 if residual is None else residual.data_ptr() + self._elements[tasklet] * _FP32_BYTES,
            padding=self._padding[tasklet],
        )

    def encoded(self, batch: native.Batch) -> Iterable[native.Batch]:
        """Return the batches to submit: the batch itself, or one per tasklet, each compressed on demand."""
        if self._selection is None:
            return [batch]
        return self._selection.parts(batch, self._payloads.tensor, self._offsets)

    def feed_back(self, tasklets: Sequence[native.Tasklet], *, scale: float) -> None:
        """After a step's commit, store the unsent part of its gradients as the residual.

        Args:
            tasklets: The step's tasklets, with gradients and payloads as the step left them.
            scale: Scale of the gradients: the loss scale.

        Raises:
            StorageError: A payload is invalid because memory was damaged, or memory ran out.
        """
        if self._residual is None:
            return
        try:
            native.feed_back(list(tasklets), residual_scale=scale, threads=self._num_threads)
        except (ValueError, MemoryError) as error:
            raise StorageError(
                f"The part of the gradients that was not sent cannot be kept: {error}.",
                "Check the memory, and resume from a checkpoint.",
            ) from error


def feed_back_threads(compute_threads: int, num_processes: int) -> int:
    """Return one process's number of ``feed_back`` threads: its share of the cores, which are idle during it.

    Args:
        compute_threads: Least number of threads.
        num_processes: Number of processes on this machine.
    """
    cores = min(available_cores(), _MOST_THREADS)
    return max(compute_threads, cores // num_processes)


def _padding_of(layout: PartitionLayout) -> list[tuple[tuple[int, int], ...]]:
    """Return the (offset, length) pairs of each tasklet's padding; offsets count from the tasklet's first element."""
    found: list[list[tuple[int, int]]] = [[] for _ in layout.tasklets]
    for parameter in layout.parameters:
        begin, end = parameter.offset + parameter.real_numel, parameter.offset + parameter.numel
        numel = layout.extents.tasklet_numel
        while begin < end:
            tasklet = layout.tasklets[begin // numel]
            stop = min(end, tasklet.offset + tasklet.numel)
            found[tasklet.index].append((begin - tasklet.offset, stop - begin))
            begin = stop
    return [tuple(of_tasklet) for of_tasklet in found]
