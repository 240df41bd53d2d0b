"""Optimizer state that stock DeepSpeed saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_smartinfinity.errors import CheckpointError

__all__ = ["describe_stock"]


def describe_stock(optimizer: Any, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a checkpoint of ours says about itself, found out about one of stock DeepSpeed.

    Raises:
        CheckpointError: It cannot be loaded.
    """
    raise CheckpointError(
        "The checkpoint was not saved by the smart_infinity strategy.",
        "Load its weights with load_from_checkpoint, or train from the start.",
    )
