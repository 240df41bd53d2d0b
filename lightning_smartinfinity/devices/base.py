"""The interface of all storage devices, and their counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import add, sub
from typing import Any

from typing_extensions import Self

from lightning_smartinfinity import native

__all__ = ["FolderTraffic", "StorageDevice", "Traffic"]


class _Counters:
    """Counters that are added and subtracted field by field, and folder by folder."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: _each(add, value, getattr(other, name)) for name, value in vars(self).items()})

    def __sub__(self, other: Self) -> Self:
        return type(self)(**{name: _each(sub, value, getattr(other, name)) for name, value in vars(self).items()})


def _each(operation: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Apply an operation to two numbers, or to two tuples of folders; missing folders count as zero."""
    if not isinstance(one, tuple):
        return operation(one, other)
    return tuple(operation(*pair) for pair in zip_longest(one, other, fillvalue=FolderTraffic()))


@dataclass(frozen=True, kw_only=True)
class FolderTraffic(_Counters):
    """Cumulative counters of one storage folder of one rank.

    Args:
        read_bytes: All bytes read from the folder: state with padding and trailers, and gradients sent through a file.
        write_bytes: All bytes written to the folder, counted in the same way.
        busy_seconds: Time during which at least one read or write was in progress.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    busy_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Traffic(_Counters):
    """Cumulative counters of one rank.

    Args:
        steps: Committed steps (filled in by the handler).
        numel: Elements updated in committed steps, in total (filled in by the handler).
        shared_read_bytes: Bytes sent to the host over the channel that all devices share: extents that the host reads
            from storage, and parameters that a card has updated.
        shared_write_bytes: Bytes sent from the host over that channel: extents that the host writes to storage, and
            gradients for a card, sent into its memory or through a file on its SSD.
        internal_read_bytes: Bytes moved inside devices from storage to accelerator: a card's state, and gradients sent
            through a file.
        internal_write_bytes: Bytes moved inside devices from accelerator to storage: a card's state.
        storage_write_bytes: All bytes written to storage, which cause its wear: extents with padding and trailers,
            gradients sent through a file, and activations, but not commit records.
        read_calls: Reads issued.
        write_calls: Writes issued.
        read_seconds: Time in reads, summed over threads.
        write_seconds: Time in writes, summed over threads.
        compute_seconds: Time in updates, summed over threads.
        kernel_seconds: Time from the start to the end of a card's runs, summed over cards.
        wait_seconds: Time that callers spent waiting.
        system_calls: System calls made for I/O.
        io_cpu_seconds: CPU time of the threads that do I/O.
        cached_read_bytes: State not read from storage because it was in host memory (``dram_cache_bytes``).
        cached_write_bytes: State not written to storage because it is kept in host memory only.
        padding_bytes: Padding to whole blocks that was moved inside devices.
        control_bytes: Bytes that protect the integrity of state: commit records and, if cards update, trailers of
            extents and the status of each run. (Trailers that the host reads and writes are part of its extents.)
        background_read_bytes: State read for checkpoints that are saved during the training (filled in by the handler).
            These reads are not included in other counters, which count the training only.
        activation_read_bytes: Tensors saved by forward for backward, read from storage (filled in by the strategy).
            Transfers of activations are not included in other counters, except ``storage_write_bytes``.
        activation_write_bytes: Tensors saved by forward for backward, written to storage.
        activation_wait_seconds: Time that forward and backward waited for these transfers.
        gradient_wait_seconds: Time that backward waited because too many gradients were on their way from a GPU to host
            memory (filled in by the strategy).
        folders: Counters of each storage folder of optimizer state, in the folders' order.
    """

    steps: int = 0
    numel: int = 0
    shared_read_bytes: int = 0
    shared_write_bytes: int = 0
    internal_read_bytes: int = 0
    internal_write_bytes: int = 0
    storage_write_bytes: int = 0
    read_calls: int = 0
    write_calls: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    compute_seconds: float = 0.0
    kernel_seconds: float = 0.0
    wait_seconds: float = 0.0
    system_calls: int = 0
    io_cpu_seconds: float = 0.0
    cached_read_bytes: int = 0
    cached_write_bytes: int = 0
    padding_bytes: int = 0
    control_bytes: int = 0
    background_read_bytes: int = 0
    activation_read_bytes: int = 0
    activation_write_bytes: int = 0
    activation_wait_seconds: float = 0.0
    gradient_wait_seconds: float = 0.0
    folders: tuple[FolderTraffic, ...] = ()

    @classmethod
    def of(cls, counters: native.Counters, **others: Any) -> Traffic:
        """Copy the native core's counters of the same names, and set the other fields."""
        same = {name: getattr(counters, name) for name in vars(cls()) if hasattr(counters, name)}
        return cls(**same | others)

    @classmethod
    def over_shared_channel(cls, counters: native.Counters) -> Traffic:
        """Convert the counters of a native pipeline that moves data between host and storage only."""
        read, written = counters.read_bytes, counters.written_bytes
        sums = {"shared_read_bytes": read, "shared_write_bytes": written, "storage_write_bytes": written}
        folders = tuple(
            FolderTraffic(read_bytes=file.read_bytes, write_bytes=file.written_bytes, busy_seconds=file.busy_seconds)
            for file in counters.files
        )
        return cls.of(counters, **sums, folders=folders)


class StorageDevice(ABC):
    """Runs batches of tasklets over a rank's state files, one batch at a time; all calls come from one thread."""

    @abstractmethod
    def open(
        self,
        *,
        files: Sequence[native.StateFile],
        identity: native.Identity,
        buffer_bytes: int,
        resident_bytes: Sequence[int] = (),
        written_through: bool = True,
    ) -> None:
        """Allocate memory and start threads.

        Args:
            files: One state file for each storage folder.
            identity: Job, rank and state format, which every extent carries.
            buffer_bytes: Size of the largest extent.
            resident_bytes: Sizes of the first tasklets' extents, whose state stays in memory.
            written_through: Whether resident state is also written to storage.
        """

    @property
    @abstractmethod
    def moves_tasklets(self) -> bool:
        """Whether the device can write a tasklet to another file than it was read from.

        If not, each tasklet stays in the storage folder to which it was first assigned.
        """

    @property
    @abstractmethod
    def updates_from_parameters(self) -> bool:
        """Whether an update can use parameters in memory as the master weights, or as their upper halves.

        If not, the update reads all master weights from storage.
        """

    @property
    @abstractmethod
    def description(self) -> str:
        """A line for users: where the open device updates, and which engine moves the state."""

    @property
    @abstractmethod
    def ring_bytes(self) -> int:
        """Host memory of the open device's buffers, including the slots for parameters on a CUDA device."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Host memory of the open device's resident tasklets."""

    @abstractmethod
    def submit(self, batch: native.Batch) -> None:
        """Start a batch and return at once."""

    @abstractmethod
    def extend(self, more: native.Batch) -> None:
        """Append tasklets to the batch, which has not been finished, and return at once."""

    @abstractmethod
    def prefer(self, positions: Sequence[int]) -> None:
        """Move these tasklets of the batch, in this order, before all others that have not started."""

    @abstractmethod
    def wait(self, positions: Sequence[int] | None = None) -> None:
        """Wait until the outputs of these tasklets (positions in the batch) are in memory; ``None`` means all.

        Those that have not started are moved before the others.

        Raises:
            StorageError: The batch failed. :meth:`finish` must still be called.
            CudaError: The batch failed while copying parameters from or to a CUDA device.
            DeviceError: The batch failed on a card.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until no work of the batch is in progress, and end the batch. Raises the errors of :meth:`wait`.

        Ctrl-C during this call or :meth:`wait` raises KeyboardInterrupt; the batch continues.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the batch in progress: start no more tasklets, and wait until none is in progress. Idempotent."""

    @abstractmethod
    def counters(self) -> Traffic:
        """Return the cumulative counters since :meth:`open`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for work in progress, then release threads and memory; idempotent."""

    def when_written(self, then: Callable[[], object]) -> None:
        """After :meth:`close`, call ``then`` once no write to the files is in progress; by default at once.

        Args:
            then: Function to call. A device that abandoned a write does not call it before that write has returned.
        """
        then()
