"""Saves DeepSpeed's loss scaler as numbers, so that no class has to be trusted when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["loss_scaler_of", "numbers_of"]

_DTYPE = "dtype"  # only fp16 has a dynamic scale
_NEEDED = {"dynamic", "cur_scale"}


def numbers_of(scaler: LossScalerBase) -> SavedState:
    """Return what :func:`loss_scaler_of` makes a loss scaler of."""
    return {name: value for name, value in vars(scaler).items() if name != _DTYPE}


def loss_scaler_of(saved: object) -> LossScalerBase:
    """Return the loss scaler that was saved: as numbers, or as the object that DeepSpeed itself saves.

    Raises:
        CheckpointError: It is neither.
    """
    if isinstance(saved, LossScalerBase):
        return saved
    numbers = saved if isinstance(saved, Mapping) else {}
    scaler = _dynamic() if numbers.get("dynamic") else LossScaler()
    known = {name: numbers[name] for name in numbers_of(scaler) if name in numbers}
    if not known.keys() >= _NEEDED or not all(isinstance(value, (bool, int, float)) for value in known.values()):
        raise CheckpointError(
            f"The checkpoint holds a {type(saved).__name__} in place of the numbers of a loss scaler.",
            "Use another checkpoint.",
        )
    vars(scaler).update(known)
    return scaler


def _dynamic() -> DynamicLossScaler:
    """Return a scaler with a dynamic scale, whose numbers do not matter."""
    return DynamicLossScaler(
        init_scale=1.0,
        scale_window=1,
        min_scale=1.0,
        delayed_shift=1,
        consecutive_hysteresis=False,
        dtype=torch.half,
    )
