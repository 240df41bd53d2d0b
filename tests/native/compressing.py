"""A tasklet to compress, with guard bytes behind its payload that must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity.native import DType, GradientCodec, Segment, Tasklet
from tests.helpers.compressed import Source
from tests.helpers.golden import Bits, Floats, decode
from tests.helpers.native_testing import decode_gradient, encode_gradient

__all__ = ["Array", "Compressing", "Parts", "decoded", "mask_of"]

Array = npt.NDArray[Any]
Parts = Sequence[tuple[int, int, int]]
"""First and last elements and steps of segments."""

_GUARD = 64
_ITEM_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2}


@dataclass
class Compressing:
    """A gradient and the memory that it is compressed to.

    Args:
        gradient: The gradient as stored.
        dtype: Its type.
        residual: The fp32 residual, or None.
        scale: Scale of the gradient.
        parts: Segments. None means one segment of step 0.
        padding: Offset and length of each run of padding.
    """

    gradient: Bits
    dtype: DType = DType.FLOAT32
    residual: Floats | None = None
    scale: float = 1.0
    parts: Parts | None = None
    padding: Sequence[tuple[int, int]] = ()
    memory: Array = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def numel(self) -> int:
        return self.gradient.size

    @property
    def source(self) -> Source:
        """Return the same input for the numpy reference."""
        sent = mask_of(self.numel, self.segments_of, self.padding)
        return Source(self.gradient, self.dtype, sent, self.residual, self.scale)

    @property
    def segments_of(self) -> Parts:
        return [(0, self.numel, 0)] if self.parts is None else self.parts

    def encode(self, codec: GradientCodec) -> bytes:
        """Return the payload and assert that the guard bytes are unchanged."""
        capacity = codec.payload_bytes(self.numel, self.dtype)
        self.memory = np.full(capacity + _GUARD, 0xA5, np.uint8)
        nbytes = encode_gradient(codec, self.tasklet(capacity), residual_scale=self.scale)
        assert nbytes <= capacity
        assert (self.memory[capacity:] == 0xA5).all()
        return self.memory[:nbytes].tobytes()

    def tasklet(self, capacity: int) -> Tasklet:
        """Return the tasklet with this many bytes for its payload."""
        return Tasklet(
            index=7,
            numel=self.numel,
            num_arrays=3,
            extent_bytes=0,
            read_file=0,
            read_offset=0,
            read_generation=0,
            write_file=0,
            write_offset=0,
            write_generation=0,
            segments=[self._segment(*part) for part in self.segments_of],
            payload=self.memory.ctypes.data,
            payload_bytes=capacity,
            residual=0 if self.residual is None else self.residual.ctypes.data,
            padding=list(self.padding),
        )

    def _segment(self, first: int, last: int, step: int) -> Segment:
        address = self.gradient.ctypes.data + first * _ITEM_BYTES[self.dtype]
        return Segment(offset=first, numel=last - first, step=step, gradient=address, gradient_dtype=self.dtype)


def mask_of(numel: int, parts: Parts, padding: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return the mask of the elements that may be sent."""
    mask = np.zeros(numel, np.bool_)
    for first, last, step in parts:
        mask[first:last] = step >= 0
    for offset, count in padding:
        mask[offset : offset + count] = False
    return mask


def decoded(payload: bytes, numel: int) -> Floats:
    """Return a payload's elements as fp32."""
    memory = np.frombuffer(payload, np.uint8).copy()
    out = np.full(4 * numel + _GUARD, 0xA5, np.uint8)
    dtype = decode_gradient(memory.ctypes.data, len(payload), numel, out.ctypes.data)
    used = _ITEM_BYTES[dtype] * numel
    assert (out[used:] == 0xA5).all()
    stored = np.float32 if dtype is DType.FLOAT32 else np.int16
    return decode(out[:used].view(stored).copy(), dtype)
