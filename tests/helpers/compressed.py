"""Payloads of compressed gradients, as a card's kernels read them, and their codecs in numpy.

The native codecs must match these bit for bit. A payload of the largest elements is::

    header    16 uint32: magic, version, numel, blocks, count, dtype of the values, beats of each part below, zeros
    counts    uint32 per block of 65,536 elements: how many of them are kept
    indices   uint16 per element kept: where it lies in its block, ascending
    values    of the header's dtype, one per index

Each part is padded with zeros to beats of 64 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity.native import DType
from tests.helpers.golden import Bits, Floats, decode, encode

MAGIC = 0x4749534C
VERSION = 1
BLOCK = 65_536
BEAT_BYTES = 64

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Payload:
    """The parts of a payload, each padded.

    Attributes:
        header, counts, indices, values: uint8, whole beats. Tests of bad payloads change them in place.
    """

    header: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.uint8]
    indices: npt.NDArray[np.uint8]
    values: npt.NDArray[np.uint8]

    def tobytes(self) -> bytes:
        """Return the payload's bytes in memory."""
        return b"".join(part.tobytes() for part in (self.header, self.counts, self.indices, self.values))


def build(positions: Positions, values: Bits, numel: int, dtype: DType) -> Payload:
    """Return the payload of chosen elements.

    Args:
        positions: Their positions in the tasklet, ascending.
        values: One per position, as stored: fp32, or 16-bit patterns (see :func:`tests.helpers.golden.encode`).
        numel: Number of elements of the tasklet.
        dtype: Type of the values.
    """
    blocks = -(-numel // BLOCK)
    counts = np.bincount(positions // BLOCK, minlength=blocks).astype(np.uint32)
    parts = [_padded(part) for part in (counts, (positions % BLOCK).astype(np.uint16), values)]
    words = [MAGIC, VERSION, numel, blocks, len(positions), int(dtype.value), *(len(p) // BEAT_BYTES for p in parts)]
    return Payload(_padded(np.array(words, np.uint32)), *parts)


def _largest(gradient: Floats, ratio: float) -> Positions:
    """Return the positions of the largest elements: this share of each block, at least one."""
    chosen = []
    for start in range(0, gradient.size, BLOCK):
        block = np.abs(gradient[start : start + BLOCK])
        count = max(1, round(block.size * ratio))
        chosen.append(start + np.sort(np.argpartition(-block, count - 1)[:count]))
    return np.concatenate(chosen).astype(np.int64) if chosen else np.empty(0, np.int64)


def compress(gradient: Floats, ratio: float, dtype: DType) -> Payload:
    """Return the payload of a dense fp32 gradient: the elements that :func:`_largest` chooses, in this type."""
    positions = _largest(gradient, ratio)
    return build(positions, encode(gradient[positions], dtype), gradient.size, dtype)


def expand(payload: bytes) -> Floats:
    """Return the dense fp32 gradient of a valid payload, zero where nothing is kept."""
    header = np.frombuffer(payload, np.uint32, 16)
    assert header[0] == MAGIC and header[1] == VERSION
    numel, blocks, count, dtype = (int(word) for word in header[2:6])
    counts_at, indices_at, values_at = BEAT_BYTES * np.cumsum([1, *header[6:8].astype(np.int64)])
    counts = np.frombuffer(payload, np.uint32, blocks, counts_at)
    indices = np.frombuffer(payload, np.uint16, count, indices_at)
    stored = np.float32 if DType(dtype) is DType.FLOAT32 else np.int16
    values = np.frombuffer(payload, stored, count, values_at)
    dense = np.zeros(numel, np.float32)
    dense[np.repeat(np.arange(blocks) * BLOCK, counts) + indices] = decode(values.copy(), DType(dtype))
    return dense


def _padded(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    part = np.zeros(-(-values.nbytes // BEAT_BYTES) * BEAT_BYTES, np.uint8)
    part[: values.nbytes] = values.view(np.uint8)
    return part


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
