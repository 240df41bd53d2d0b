"""The codec that sends gradients in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_smartinfinity import native
from lightning_smartinfinity.settings.codec import GradientCodec
from lightning_smartinfinity.settings.rules import FLAG, require
from lightning_smartinfinity.settings.wrong_names import named_settings

__all__ = ["BlockScaled"]


@named_settings
@dataclass(frozen=True)
class BlockScaled(GradientCodec):
    """Sends every gradient in 8 bits, with one scale for each block of 256 elements.

    Args:
        error_feedback: Whether to add the rounding error to the gradient of the next step.

    Raises:
        ConfigError: ``error_feedback`` is not a bool.
    """

    error_feedback: bool = True

    def __post_init__(self) -> None:
        require(self, error_feedback=FLAG)

    def native(self) -> native.GradientCodec:
        return native.BlockScaled()
