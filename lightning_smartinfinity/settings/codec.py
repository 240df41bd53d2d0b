"""The interface of all gradient codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lightning_smartinfinity import native
from lightning_smartinfinity.settings.rules import Rule

__all__ = ["CODEC", "GradientCodec"]


class GradientCodec(ABC):
    """Encodes each tasklet's gradient as one payload, which the update decodes.

    A codec is one frozen dataclass here and a class with its arithmetic in the native core.

    Attributes:
        error_feedback: Whether to keep the part of the gradient that a payload leaves out, in 4 bytes of host memory
            per parameter, and to add it to the next step's gradient.
    """

    error_feedback: bool

    @property
    def keeps_residual(self) -> bool:
        """Whether the step keeps a residual: True with error feedback, unless payloads leave nothing out."""
        return self.error_feedback

    @abstractmethod
    def native(self) -> native.GradientCodec:
        """Return the native object that encodes with these settings."""


CODEC = Rule(
    "Pass compression=TopK(ratio=0.01)", lambda value: isinstance(value, GradientCodec), "is not a gradient codec"
)
