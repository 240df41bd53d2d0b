"""Sizes of the ring through which gradients of a GPU pass to host memory: arithmetic only."""

from __future__ import annotations

__all__ = ["MOST_ON_DEVICE_BYTES", "RING_BYTES", "SLOT_BYTES", "ring_bytes"]

RING_BYTES = 64 << 20
"""Most bytes of registered host memory that gradients pass through, for a model of any size."""

SLOT_BYTES = 2 << 20
"""Bytes of a slot of the ring: most bytes of a gradient that are copied by one call."""

MOST_ON_DEVICE_BYTES = 128 << 20
"""Bytes of gradients on their way above which backward waits. They are in the device's memory until they are copied."""

_LEAST_SLOTS = 2


def ring_bytes(gradient_bytes: int) -> int:
    """Return the bytes of the ring for gradients that take ``gradient_bytes`` in all."""
    return min(RING_BYTES, SLOT_BYTES * max(_LEAST_SLOTS, -(-gradient_bytes // SLOT_BYTES)))
