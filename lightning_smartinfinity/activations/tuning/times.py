"""Measured times of training with offloading and without."""

from __future__ import annotations

__all__ = ["MOST_LOST", "Times"]

MOST_LOST = 20
"""One over the share of its time by which offloading may make a forward and its backward longer."""


class Times:
    """Times of comparable forwards with offloading and without.

    The fastest of each are compared, because a single one may be slow for any reason.

    Attributes:
        offloading: Times with offloading.
        plain: Times without.
    """

    def __init__(self, offloading: list[float] | None = None, plain: list[float] | None = None) -> None:
        self.offloading, self.plain = offloading or [], plain or []

    @property
    def excess(self) -> float:
        """Share by which offloading makes the time longer, at least 0.0."""
        return max(0.0, min(self.offloading) / min(self.plain) - 1)
