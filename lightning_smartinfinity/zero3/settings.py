"""What the ZeRO-3 optimizer needs to know about storage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.config import TransferConfig

__all__ = ["OffloadSettings"]


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Where optimizer state lives and how it moves.

    Args:
        storage: One folder per storage device.
        transfer: Ring, engine and durability.
    """

    storage: tuple[Path, ...]
    transfer: TransferConfig
