"""Compresses gradients with numpy: the reference that the codecs must match bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity.native import DType
from tests.helpers.golden import Bits, decode, encode
from tests.helpers.payload import Payload, build
from tests.helpers.update_rules import Floats

__all__ = [
    "BLOCK_SCALED_MAGIC",
    "Codes",
    "Source",
    "block_scaled",
    "block_scaled_codes",
    "fed_back",
    "rounded",
    "top_k",
]

BLOCK_SCALED_MAGIC = 0x4249534C
_BLOCK = 256
_FP32_MAX = np.finfo(np.float32).max
_LARGEST = {DType.FLOAT16: 65504.0, DType.BFLOAT16: float(np.array(0x7F7F0000, np.uint32).view(np.float32))}


@dataclass(frozen=True)
class Source:
    """The gradient of a tasklet, and which part of it to send.

    Attributes:
        gradient: The gradient as stored: fp32, or 16-bit patterns.
        dtype: Type of the gradient.
        sent: Which elements may be sent; None means all.
        residual: The fp32 residual, or None.
        scale: Scale of the gradient.
    """

    gradient: Bits
    dtype: DType = DType.FLOAT32
    sent: npt.NDArray[np.bool_] | None = None
    residual: Floats | None = None
    scale: float = 1.0

    @property
    def values(self) -> Floats:
        """The sum of the gradient and the residual, zero where nothing may be sent."""
        values = decode(self.gradient, self.dtype)
        if self.residual is not None:
            with np.errstate(all="ignore"):
                summed = np.clip(values + self.residual * np.float32(self.scale), -_FP32_MAX, _FP32_MAX)
            values = np.where(self.residual != 0, summed, values)
        return np.where(self.eligible, values, np.float32(0))

    @property
    def eligible(self) -> npt.NDArray[np.bool_]:
        return np.ones(self.gradient.size, np.bool_) if self.sent is None else self.sent


def top_k(source: Source, ratio: float, value_dtype: DType | None = None) -> bytes:
    """Return the payload of the largest elements."""
    values, numel = source.values, source.gradient.size
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    order = np.lexsort((np.arange(numel), -magnitudes.astype(np.int64)))
    order = order[source.eligible[order] & ((magnitudes[order] > 0) | (ratio == 1))]
    chosen = np.sort(order[: math.ceil(ratio * numel)])
    dtype = source.dtype if ratio == 1 or value_dtype is None else value_dtype
    return build(chosen, rounded(values[chosen], dtype), numel, dtype).tobytes()


def rounded(values: Floats, dtype: DType) -> Bits:
    """Round values to the nearest ones of a type; a finite value stays finite."""
    stored = encode(values, dtype)
    if dtype is not DType.FLOAT32:
        overflowed = np.isinf(decode(stored, dtype)) & np.isfinite(values)
        largest = np.copysign(np.float32(_LARGEST[dtype]), values[overflowed])
        stored[overflowed] = encode(largest, dtype)
    return stored


def fed_back(source: Source, sent: Floats) -> Floats:
    """Return the residual after a step that sent these values, which are zero where nothing was sent."""
    assert source.residual is not None
    with np.errstate(all="ignore"):
        rest = (source.values - sent) / np.float32(source.scale)
    return np.where(source.eligible, rest, source.residual)


@dataclass(frozen=True)
class Codes:
    """Values in 8 bits.

    Attributes:
        exponents: A uint8 for each block of 256.
        codes: An int8 for each value.
    """

    exponents: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.int8]

    @property
    def values(self) -> Floats:
        """The exact values that the codes stand for."""
        scales = np.exp2(self.exponents.astype(np.float64) - 127)
        return (self.codes * np.repeat(scales, _BLOCK)[: self.codes.size]).astype(np.float32)

    def payload(self) -> Payload:
        """Return the payload, with exponents in place of a sparse gradient's indices and no counts."""
        parts = [_padded(self.exponents), _padded(self.codes)]
        sizes = [self.codes.size, self.exponents.size, _BLOCK, 0, *(part.size // 64 for part in parts)]
        header = _padded(np.array([BLOCK_SCALED_MAGIC, 1, *sizes], np.uint32))
        return Payload(header, np.zeros(0, np.uint8), *parts)


def block_scaled(values: Floats) -> bytes:
    """Return the payload with 8 bits for each of these finite values."""
    return block_scaled_codes(values).payload().tobytes()


def block_scaled_codes(values: Floats) -> Codes:
    """Return the codes of finite values, computed by exact arithmetic."""
    numel = values.size
    blocks = np.zeros((-(-numel // _BLOCK), _BLOCK), np.float64)
    blocks.reshape(-1)[:numel] = values
    largest = np.abs(blocks).max(axis=1, initial=0)
    # The least power of two whose 127.5-fold exceeds it: np.frexp gives largest = m * 2**e with m in [0.5, 1).
    mantissas, exponents = np.frexp(largest)
    scales = np.where(largest > 0, exponents - 7 + (mantissas >= 127.5 / 128), -126)
    scales = np.clip(scales, -126, 121)
    codes = np.clip(np.rint(blocks / np.exp2(scales)[:, None]), -127, 127).astype(np.int8)
    return Codes((scales + 127).astype(np.uint8), codes.reshape(-1)[:numel])


def _padded(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    part = np.zeros(-(-values.nbytes // 64) * 64, np.uint8)
    part[: values.nbytes] = values.view(np.uint8)
    return part
