""":class:`TopK` written in torch operations, for GPUs, whose memory is much faster than the host's.

The results equal those of the native core bit for bit.
"""

from __future__ import annotations

import math

import torch

__all__ = ["top_k_payload", "with_residual"]

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
