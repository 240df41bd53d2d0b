"""Top-K on the gradients' device: each tasklet's gradients are copied to it, and its payload is copied back.

The results equal those of the native core bit for bit. A GPU's memory is much faster than the host's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.pipeline.layout.tensors import torch_dtype
from lightning_smartinfinity.settings.top_k import TopK

__all__ = [
    "DeviceSelection",
    "top_k_payload",
    "with_residual",
]


_MAGIC, _VERSION = 0x4749534C, 1
_DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BLOCK = 65_536
_BEAT_BYTES = 64
_MAGNITUDE = 0x7FFFFFFF
_LEFT_OUT = -1


def with_residual(gradient: torch.Tensor, residual: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``gradient + residual * scale``, or the gradient itself where the residual is zero.

    Both operations round, and the magnitude of the sum is limited to that of the largest finite float32.

    Args:
        gradient: float32, on any device.
        residual: float32, of the same length and on the same device.
        scale: Loss scale of the gradient; the residual is unscaled.
    """
    limit = torch.finfo(torch.float32).max
    return torch.where(residual == 0, gradient, (gradient + residual * scale).clamp(-limit, limit))


def top_k_payload(
    values: torch.Tensor, *, ratio: float, value_dtype: torch.dtype, taken: torch.Tensor | None = None
) -> torch.Tensor:
    """Return one tasklet's payload: header, counts, indices and values of the elements of largest magnitude.

    Args:
        values: float32[numel], on any device.
        ratio: Share of the elements, in (0, 1].
        value_dtype: Dtype of the values sent: float32, bfloat16 or float16.
        taken: bool[numel]: which elements may be sent; None means all.

    Returns:
        uint8 tensor on the same device, padded to whole beats of 64 bytes.
    """
    chosen = torch.nonzero(_chosen(values, ratio, taken)).squeeze(1)
    numel = values.numel()
    counts = torch.bincount(chosen // _BLOCK, minlength=-(-numel // _BLOCK)).to(torch.int32)
    # torch has no arithmetic on uint16; int16 holds the same bits.
    indices = (chosen % _BLOCK).to(torch.int32).to(torch.int16)
    parts = [_padded(part) for part in (counts, indices, _rounded(values[chosen], value_dtype))]
    beats = [part.numel() // _BEAT_BYTES for part in parts]
    words = [_MAGIC, _VERSION, numel, counts.numel(), chosen.numel(), _DTYPE_NUMBERS[value_dtype], *beats]
    header = torch.tensor(words, dtype=torch.int32, device=values.device)
    return torch.cat([_padded(header), *parts])


def _chosen(values: torch.Tensor, ratio: float, taken: torch.Tensor | None) -> torch.Tensor:
    """Return bool[numel]: the ceil(ratio * numel) largest elements, the first among equals; zeros only at ratio 1."""
    # As integers, bit patterns are ordered as magnitudes are, with NaN above infinity.
    keys = values.view(torch.int32) & _MAGNITUDE
    if taken is not None:
        keys = torch.where(taken, keys, _LEFT_OUT)
    if ratio == 1 or not values.numel():
        return keys != _LEFT_OUT
    count = math.ceil(ratio * values.numel())
    threshold = torch.topk(keys, count, sorted=True).values[-1].clamp(min=1)
    above, equal = keys > threshold, keys == threshold
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the nearest value of ``dtype``, ties to even; finite values stay finite."""
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


def _padded(part: torch.Tensor) -> torch.Tensor:
    data = part.view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -data.numel() % _BEAT_BYTES))


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
                    f"There is no memory on {self._device} to choose the elements of one tasklet to send: {error}.",
                    "Use smaller tasklets (TransferConfig(tasklet_bytes=...)), or a smaller batch.",
                ) from error
            yield native.Batch(
                batch.operation,
                [encoded],
                batch.steps,
                batch.stream,
                slot_bytes=batch.slot_bytes,
                writes_back=batch.writes_back,
            )

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
