"""Sizes of gradients in each form of transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_smartinfinity.settings.rules import among, positive, require

__all__ = ["ITEM_BYTES", "BlockScaledPayload", "Dense", "GradientForm", "Pairs", "TopKPayload"]

ITEM_BYTES = among((2, 4))
"""Bytes of an element in 16 or 32 bits."""

_BEAT_BYTES = 64
_BLOCK_NUMEL = 65536
_SCALED_BLOCK_NUMEL = 256
_COUNT_BYTES = 4
_INDEX_BYTES = 2


@runtime_checkable
class GradientForm(Protocol):
    """The size of gradients in one form."""

    @property
    def compressed(self) -> bool:
        """Whether gradients must be compressed before they are sent."""

    @property
    def sparse(self) -> bool:
        """Whether the accelerator must scatter the kept elements."""

    def nbytes(self, numel: int) -> float:
        """Return the bytes of a gradient of this many elements."""


@dataclass(frozen=True)
class Dense:
    """All elements of the gradient.

    Args:
        item_bytes: Bytes of an element: 2 or 4.
    """

    item_bytes: int

    def __post_init__(self) -> None:
        require(self, item_bytes=ITEM_BYTES)

    @property
    def compressed(self) -> bool:
        return False

    @property
    def sparse(self) -> bool:
        return False

    def nbytes(self, numel: int) -> float:
        return numel * self.item_bytes


@dataclass(frozen=True)
class TopKPayload:
    """The payload that this project's sparse kernels expand.

    It is a header, then, each padded to beats of 64 bytes, the counts of blocks of 65,536 elements, the indices of the
    kept elements and their values.

    Args:
        ratio: Share of the elements that are kept, above 0 and at most 1.
        value_bytes: Bytes of each value: 2 or 4.
    """

    ratio: float
    value_bytes: int

    def __post_init__(self) -> None:
        require(self, ratio=positive(1), value_bytes=ITEM_BYTES)

    @property
    def compressed(self) -> bool:
        return True

    @property
    def sparse(self) -> bool:
        return True

    def nbytes(self, numel: int) -> float:
        kept = math.ceil(self.ratio * numel)
        return _payload_bytes(_COUNT_BYTES * -(-numel // _BLOCK_NUMEL), _INDEX_BYTES * kept, self.value_bytes * kept)


@dataclass(frozen=True)
class BlockScaledPayload:
    """The payload that this project's kernels scale.

    It is a header, then, each padded to beats of 64 bytes, an exponent for each block of 256 elements and a code for
    each element.
    """

    @property
    def compressed(self) -> bool:
        return True

    @property
    def sparse(self) -> bool:
        return False

    def nbytes(self, numel: int) -> float:
        return _payload_bytes(-(-numel // _SCALED_BLOCK_NUMEL), numel)


@dataclass(frozen=True)
class Pairs:
    """Indices and values of 4 bytes each, as in the paper.

    Args:
        volume: Bytes relative to a dense fp32 gradient, above 0 and at most 2; 0.02 keeps 1 % of the elements.
    """

    volume: float

    def __post_init__(self) -> None:
        require(self, volume=positive(2))

    @property
    def compressed(self) -> bool:
        return True

    @property
    def sparse(self) -> bool:
        return True

    def nbytes(self, numel: int) -> float:
        return 4 * self.volume * numel


def _payload_bytes(*parts: int) -> int:
    """Return the bytes of a payload: a header and the parts, each padded to beats."""
    return _BEAT_BYTES + sum(-(-part // _BEAT_BYTES) * _BEAT_BYTES for part in parts)
