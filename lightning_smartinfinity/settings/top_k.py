"""The codec that sends the largest gradients of each tasklet."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from lightning_smartinfinity import native
from lightning_smartinfinity.settings.codec import GradientCodec
from lightning_smartinfinity.settings.rules import FLAG, one_of, positive, require
from lightning_smartinfinity.settings.wrong_names import named_settings

__all__ = ["TopK"]

_DTYPES = {"fp32": native.DType.FLOAT32, "bf16": native.DType.BFLOAT16, "fp16": native.DType.FLOAT16}


@named_settings
@dataclass(frozen=True)
class TopK(GradientCodec):
    """Sends the gradients of largest magnitude of each tasklet; the update uses zero for the others.

    Each element sent has 2 bytes of index and 2 or 4 bytes of value: at ``ratio=0.01`` with 16-bit values, 0.04 bytes
    per parameter cross the shared channel instead of 2 or 4.

    Args:
        ratio: Share of a tasklet's elements that is sent, above 0 and at most 1. (SmartComp's volume of 2 % is
            ``ratio=0.01``.) 1.0 sends all elements, including zeros, in the dtype in which they are accumulated, and
            ignores the other settings; results do not change by a bit.
        error_feedback: Whether to add the elements not sent to the gradient of the next step.
        value_dtype: Dtype of the values sent: ``"fp32"``, ``"bf16"``, ``"fp16"``, or ``"auto"`` for the dtype in
            which gradients are accumulated.
        exact: Whether to find the largest elements exactly. If not, their threshold is estimated from a sample, and
            about as many are sent.

    Raises:
        ConfigError: A setting has a forbidden value.
    """

    ratio: float
    error_feedback: bool = True
    value_dtype: str = "auto"
    exact: bool = True

    def __post_init__(self) -> None:
        require(self, ratio=positive(1), error_feedback=FLAG, value_dtype=one_of("auto", *_DTYPES), exact=FLAG)
        if self.ratio == 1 and (self.value_dtype != "auto" or not self.exact):
            warnings.warn(f"{self} sends all gradients as they are: value_dtype and exact are ignored.", stacklevel=3)

    @property
    def keeps_residual(self) -> bool:
        return self.error_feedback and self.ratio < 1

    def native(self) -> native.GradientCodec:
        return native.TopK(ratio=self.ratio, value_dtype=_DTYPES.get(self.value_dtype), exact=self.exact)
