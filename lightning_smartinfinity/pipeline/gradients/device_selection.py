"""Top-K on the gradients' device: each tasklet's gradients are copied to it, and its payload is copied back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.pipeline.gradients.torch_selection import top_k_payload, with_residual
from lightning_smartinfinity.pipeline.layout.tensors import torch_dtype
from lightning_smartinfinity.settings.top_k import TopK

__all__ = ["DeviceSelection"]

_NO_STEP = -1


class DeviceSelection:
    """Compresses tasklets with torch instead of the native core; payloads are equal bit for bit.

    It needs device memory for one tasklet at a time.

    Args:
        codec: The codec, with ``exact=True``.
        device: The torch device that selects.
        gradients: The arena's flat tensor, in host memory.
        residual: float32 tensor of the same length; None without error feedback.
    """

    def __init__(
        self, codec: TopK, *, device: torch.device, gradients: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        self._ratio = codec.ratio
        self._native = codec.native()
        self._device = device
        self._gradients = gradients
        self._residual = residual

    def parts(self, batch: native.Batch, payloads: torch.Tensor, offsets: list[int]) -> Iterator[native.Batch]:
        """Compress a batch's gradients tasklet by tasklet, on demand of the iterator.

        Args:
            batch: Batch with a codec, whose tasklets have gradients and memory for their payloads.
            payloads: uint8 tensor over the memory of all payloads.
            offsets: Offset of each tasklet's payload in ``payloads``, by tasklet index of the layout.

        Yields:
            A batch without codec for each tasklet, with a payload instead of gradients.

        Raises:
            CudaError: The device has too little memory.
        """
        for point in batch.ready:
            point.synchronize()  # copies of gradients to the host may still be in flight
        for tasklet in batch.tasklets:
            try:
                encoded = self._encoded(tasklet, payloads[offsets[tasklet.index] :], batch.residual_scale)
            except torch.OutOfMemoryError as error:
                raise CudaError(
                    f"There is no memory on {self._device} to choose what is sent of one tasklet: {error}.",
                    "Use smaller tasklets (TransferConfig(tasklet_bytes=...)), or a smaller batch.",
                ) from error
            yield native.Batch(batch.operation, [encoded], batch.steps, batch.stream, slot_bytes=batch.slot_bytes)

    def _encoded(self, tasklet: native.Tasklet, place: torch.Tensor, scale: float) -> native.Tasklet:
        where = slice(tasklet.offset, tasklet.offset + tasklet.numel)
        values = self._gradients[where].to(self._device).float()
        if self._residual is not None:
            values = with_residual(values, self._residual[where].to(self._device), scale)
        dtype = self._native.value_dtype(_dtype_of(tasklet))
        payload = top_k_payload(
            values, ratio=self._ratio, value_dtype=torch_dtype(dtype), taken=_taken(tasklet).to(self._device)
        )
        place[: payload.numel()].copy_(payload)
        return tasklet.compressed(payload.numel(), dtype)


def _dtype_of(tasklet: native.Tasklet) -> native.DType:
    return next((one.gradient_dtype for one in tasklet.segments if one.step != _NO_STEP), native.DType.FLOAT32)


def _taken(tasklet: native.Tasklet) -> torch.Tensor:
    """Return bool[numel]: the elements that are updated and are not padding."""
    taken = torch.zeros(tasklet.numel, dtype=torch.bool)
    for segment in tasklet.segments:
        if segment.step != _NO_STEP:
            taken[segment.offset : segment.offset + segment.numel] = True
    for offset, numel in tasklet.padding:
        taken[offset : offset + numel] = False
    return taken
