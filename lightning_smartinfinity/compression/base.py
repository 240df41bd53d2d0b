"""What a gradient codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import ConfigError

__all__ = ["GradientCodec", "checked_compression"]


class GradientCodec(ABC):
    """How gradients travel to the update: each tasklet's becomes one payload, which is decoded inside the update.

    A codec is one frozen dataclass here and its arithmetic in the native core.

    Attributes:
        error_feedback: What a payload leaves out is kept, in 4 bytes of host memory per parameter, and added to the
            next step's gradient.
    """

    error_feedback: bool

    @property
    def keeps_residual(self) -> bool:
        """Whether there is a residual: with error feedback, unless payloads leave nothing out."""
        return self.error_feedback

    @abstractmethod
    def native(self) -> native.GradientCodec:
        """Its arithmetic."""


def checked_compression(compression: GradientCodec | None) -> GradientCodec | None:
    """What the user passed to the strategy.

    Raises:
        ConfigError: It is no codec.
    """
    if compression is not None and not isinstance(compression, GradientCodec):
        raise ConfigError(
            f"compression={compression!r} of the smart_infinity strategy is not a gradient codec.",
            "Pass compression=TopK(ratio=0.01).",
        )
    return compression
