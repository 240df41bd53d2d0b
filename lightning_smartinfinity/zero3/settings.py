"""Storage settings of the ZeRO-3 optimizer and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.ring import DRIVE_BUFFERS
from lightning_smartinfinity.settings import CARD_TASKLET_BYTES, HOST_TASKLET_BYTES
from lightning_smartinfinity.settings.strategy import StrategySettings

if TYPE_CHECKING:
    from lightning_smartinfinity.devices.smartssd import CardSetup
    from lightning_smartinfinity.storage.records.training_record import TrainingRecord

__all__ = ["OffloadSettings", "ParameterSettings"]

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class OffloadSettings(StrategySettings):
    """The user's settings, and facts about the training.

    Args:
        storage: One folder per storage device.
        cards: The SmartSSDs that run the update; None: the host runs it.
        gradient_itemsize: Bytes per element of gradients; until the arena's dtype is known, the largest possible value.
        parameter_itemsize: Bytes per element of parameters; the largest possible value until known.
        feed_back_threads: Number of threads that write the values dropped by compression to the residual.
        gradient_budget: Bytes of gradients to hold in memory, the rest being on storage; None: all are in memory.
        resumes: Whether the training resumes from the state that an interrupted training left on storage.
        records: Whether training records are written automatically.
        own_hyperparameters: Whether a resumed training has the hyperparameters that the script gives its optimizer,
            not those that were saved.
        check_record: Called with each training record to resume from, before anything moves; raises
            StorageCorruptError if the training cannot read it.
    """

    storage: tuple[Path, ...] = field()  # without the base's default
    cards: CardSetup | None = None
    gradient_itemsize: int = 4
    parameter_itemsize: int = 4
    feed_back_threads: int = 1
    gradient_budget: int | None = None
    resumes: bool = False
    records: bool = False
    own_hyperparameters: bool = False
    check_record: Callable[[TrainingRecord], object] = bool

    def transferred_gradient_bytes(self, numel: int) -> int:
        """Return the largest size of a gradient of ``numel`` elements in its transfer to the update, in bytes."""
        if self.compression is None:
            return numel * self.gradient_itemsize
        dtype = native.DType.FLOAT32 if self.gradient_itemsize == _FP32_BYTES else native.DType.BFLOAT16
        return self.compression.native().payload_bytes(numel, dtype)

    def recorded_numel(self, numel: int) -> int:
        """Return the number of residual values in each training record, for a partition of ``numel`` elements.

        Zero if the user's loop decides whether to write records.
        """
        recorded = self.records and self.transfer.is_resumable
        return numel if recorded and self.compression is not None and self.compression.keeps_residual else 0

    @property
    def num_buffers(self) -> int:
        """``TransferConfig.num_buffers`` as a number; on SmartSSDs, and until it was chosen, that of one drive."""
        wanted = self.transfer.num_buffers
        return wanted if isinstance(wanted, int) else DRIVE_BUFFERS

    @property
    def tasklet_bytes(self) -> int:
        """``TransferConfig.tasklet_bytes`` as a number, or the default of the device."""
        return self.transfer.buffer_bytes or (HOST_TASKLET_BYTES if self.cards is None else CARD_TASKLET_BYTES)


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """Where parameters are stored, and how much host memory they may use.

    Args:
        folders: Storage folders.
        job: ``TransferConfig.job``.
        direct_io: ``TransferConfig.file_access``.
        io_engine: ``TransferConfig.io_engine``.
        io_timeout: ``TransferConfig.io_timeout``.
        buffer_count: Number of buffers for partitions in use or read ahead.
        buffer_numel: Elements of each buffer; None: the size of the largest partition.
        persistence_numel: DeepSpeed keeps parameters of up to this many elements gathered; they are not stored.
        budget: Bytes of parameters that may be in memory at once; None: as many as the buffers hold.
    """

    folders: tuple[Path, ...]
    job: str
    direct_io: str
    io_engine: str
    io_timeout: float
    buffer_count: int
    buffer_numel: int | None
    persistence_numel: int
    budget: int | None = None
