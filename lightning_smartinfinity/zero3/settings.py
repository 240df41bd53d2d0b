"""What the ZeRO-3 optimizer needs to know about storage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.config import TransferConfig

__all__ = ["OffloadSettings", "ParameterSettings"]


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Where optimizer state lives and how it moves.

    Args:
        storage: One folder per storage device.
        transfer: Ring, engine and durability.
        state_format: How it lies there.
        overlap: What the update may run beside: ``"none"``, ``"forward"``, ``"backward"`` or ``"auto"``.
    """

    storage: tuple[Path, ...]
    transfer: TransferConfig
    state_format: str = "fp32"
    overlap: str = "none"


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """Where parameters lie and what host memory they may take.

    Args:
        folders: Storage folders.
        job: ``TransferConfig.job``.
        direct_io: ``TransferConfig.file_access``.
        io_engine: ``TransferConfig.io_engine``.
        buffer_count: Buffers for partitions in use or read ahead.
        buffer_numel: Elements of each; None: the largest partition.
        persistence_numel: DeepSpeed keeps parameters of so many elements gathered; they are not stored.
    """

    folders: tuple[Path, ...]
    job: str
    direct_io: str
    io_engine: str
    buffer_count: int
    buffer_numel: int | None
    persistence_numel: int
