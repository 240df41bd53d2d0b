"""What the ZeRO-3 optimizer needs to know about storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.config import CARD_TASKLET_BYTES, HOST_TASKLET_BYTES
from lightning_smartinfinity.devices.smartssd import CardPlan
from lightning_smartinfinity.settings import StrategySettings

__all__ = ["OffloadSettings", "ParameterSettings"]

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class OffloadSettings(StrategySettings):
    """The user's settings, and what is known of the training.

    Args:
        storage: One folder per storage device.
        cards: The SmartSSDs that update; None: the host does.
        gradient_itemsize: Bytes of a gradient's element, before there is an arena to ask; unless known, the most.
        parameter_itemsize: Bytes of a parameter's element, likewise.
        feed_back_threads: Number of threads that put what compression did not send into the residual.
    """

    storage: tuple[Path, ...] = field()  # without the default of the base
    cards: CardPlan | None = None
    gradient_itemsize: int = 4
    parameter_itemsize: int = 4
    feed_back_threads: int = 1

    def gradient_bytes(self, numel: int) -> int:
        """The most that the gradient of so many elements takes on its way to the update."""
        if self.compression is None:
            return numel * self.gradient_itemsize
        dtype = native.DType.FLOAT32 if self.gradient_itemsize == _FP32_BYTES else native.DType.BFLOAT16
        return self.compression.native().payload_bytes(numel, dtype)

    @property
    def tasklet_bytes(self) -> int:
        """``TransferConfig.tasklet_bytes``, or what suits the device."""
        return self.transfer.tasklet_bytes or (HOST_TASKLET_BYTES if self.cards is None else CARD_TASKLET_BYTES)


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
