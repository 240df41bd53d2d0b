"""Where gradients are compressed to on their way to the update, and what that leaves out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.compression import GradientCodec, TopK
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.transfer.batches import Compression
from lightning_smartinfinity.transfer.cuda import CudaLink
from lightning_smartinfinity.transfer.device_selection import DeviceSelection
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.tensors import HostTensor, native_dtype

__all__ = ["CompressedGradients", "feed_back_threads"]

_BEAT_BYTES = 64
_FP32_BYTES = 4
_MOST_THREADS = 8  # of all processes of a machine: each moves some 15 GB/s, as much as memory gives to few more


class CompressedGradients:
    """One rank's payloads, a place for each tasklet, and its residual.

    Gradients are compressed by the device, each tasklet's just before it is updated. Payloads last until the step that
    wrote them is committed: only then :meth:`feed_back` moves the residual, so that a step that is skipped, undone or
    taken again finds the one it began with.

    Args:
        layout: The partition.
        codec: The user's.
        gradients: The arena's flat tensor.
        num_threads: That work in :meth:`feed_back`.
        device: Where torch is to select; None: the native core does, just before each tasklet's update.
        link: To that device: the residual is registered for it.

    Attributes:
        codec: The native core's.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        codec: GradientCodec,
        *,
        gradients: torch.Tensor,
        num_threads: int,
        device: torch.device | None = None,
        link: CudaLink | None = None,
    ) -> None:
        self.codec = codec.native()
        self._num_threads = num_threads
        tasklets = layout.tasklets
        self._sizes = [self.codec.payload_bytes(tasklet.numel, native_dtype(gradients.dtype)) for tasklet in tasklets]
        self._offsets = [0, *accumulate(-(-size // _BEAT_BYTES) * _BEAT_BYTES for size in self._sizes)]
        self._payloads = HostTensor(self._offsets[-1], torch.uint8)
        selects = device if isinstance(codec, TopK) and codec.exact else None
        memory = link.host_tensor if link is not None and selects is not None else HostTensor
        self._residual = memory(layout.numel, torch.float32) if codec.keeps_residual else None
        self._elements = [tasklet.offset for tasklet in tasklets]
        self._padding = _padding_of(layout)
        self._selection = None
        if selects is not None and isinstance(codec, TopK):
            self._selection = DeviceSelection(codec, device=selects, gradients=gradients, residual=self.residual)

    @property
    def residual(self) -> torch.Tensor | None:
        """float32[numel] of the partition, unscaled and not clipped; None without error feedback."""
        return None if self._residual is None else self._residual.tensor

    @property
    def payload_bytes(self) -> int:
        """Host memory of the payloads, as far as they have been written."""
        return self._offsets[-1]

    @property
    def residual_bytes(self) -> int:
        """Host memory of the residual."""
        return 0 if self._residual is None else self._residual.tensor.nbytes

    def close(self) -> None:
        """Unregister the residual; idempotent. Tensors handed out keep its memory until they are gone."""
        if self._residual is not None:
            self._residual.close()

    def of(self, tasklet: int) -> Compression:
        """Of one tasklet of the layout."""
        residual = self.residual
        return Compression(
            payload=self._payloads.tensor.data_ptr() + self._offsets[tasklet],
            payload_bytes=self._sizes[tasklet],
            residual=0 if residual is None else residual.data_ptr() + self._elements[tasklet] * _FP32_BYTES,
            padding=self._padding[tasklet],
        )

    def encoded(self, batch: native.Batch) -> Iterable[native.Batch]:
        """The batch to submit: as it is, or compressed already, tasklet by tasklet while those before are updated."""
        if self._selection is None:
            return [batch]
        parts = self._selection.parts(batch, self._payloads.tensor, self._offsets)
        if batch.stream is None:
            return parts
        # Parameters in a device's memory: such a batch is given whole.
        tasklets = [tasklet for part in parts for tasklet in part.tasklets]
        return [native.Batch(batch.operation, tasklets, batch.steps, batch.stream)]

    def feed_back(self, tasklets: Sequence[native.Tasklet], *, scale: float) -> None:
        """Once a step is committed: what it did not send of its gradients becomes the residual.

        Args:
            tasklets: Of the step; gradients and payloads are as it left them.
            scale: Of the gradients: the loss scale.

        Raises:
            StorageError: A payload is not what was written: the memory has been damaged. Or there is none left.
        """
        if self._residual is None:
            return
        try:
            native.feed_back(list(tasklets), residual_scale=scale, threads=self._num_threads)
        except (ValueError, MemoryError) as error:
            raise StorageError(
                f"What was not sent of the gradients cannot be kept: {error}.",
                "Check the memory, and resume from a checkpoint.",
            ) from error


def feed_back_threads(compute_threads: int, num_processes: int) -> int:
    """How many threads of one process feed residuals: its part of the cores, which have nothing else to do then.

    Args:
        compute_threads: At least so many.
        num_processes: Of this machine.
    """
    cores = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    return max(compute_threads, cores // num_processes)


def _padding_of(layout: PartitionLayout) -> list[tuple[tuple[int, int], ...]]:
    """Of each tasklet, in its own elements."""
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
