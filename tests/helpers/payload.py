"""The payload of a compressed gradient, as a card's kernels read it.

::

    header    16 uint32: magic, version, numel, blocks, count, dtype of the values, beats of each part below, zeros
    counts    uint32 per block of 65,536 elements: how many of them are kept
    indices   uint16 per element kept: where it lies in its block, ascending
    values    of the header's dtype, one per index

Each part is padded with zeros to beats of 64 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity.native import DType
from tests.helpers.golden import Bits, decode, encode
from tests.helpers.update_rules import Floats

__all__ = ["BEAT_BYTES", "BLOCK", "MAGIC", "VERSION", "Payload", "build", "compress", "expand", "top_k"]

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
        """Return the payload as it lies in memory."""
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


def top_k(gradient: Floats, ratio: float) -> Positions:
    """Return the positions of the largest elements: this share of each block, at least one."""
    chosen = []
    for start in range(0, gradient.size, BLOCK):
        block = np.abs(gradient[start : start + BLOCK])
        count = max(1, round(block.size * ratio))
        chosen.append(start + np.sort(np.argpartition(-block, count - 1)[:count]))
    return np.concatenate(chosen).astype(np.int64) if chosen else np.empty(0, np.int64)


def compress(gradient: Floats, ratio: float, dtype: DType) -> Payload:
    """Return the payload of a dense fp32 gradient: the elements that :func:`top_k` chooses, in this type."""
    positions = top_k(gradient, ratio)
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
