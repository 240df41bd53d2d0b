"""What a storage device is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

from lightning_smartinfinity import native

__all__ = ["FolderTraffic", "StorageDevice", "Traffic"]


@dataclass(frozen=True, kw_only=True)
class FolderTraffic:
    """Cumulative counters of one storage folder of one rank.

    Args:
        read_bytes: Read from it, all of it: state with its padding and trailers, gradients that go through a file.
        write_bytes: Written to it, likewise.
        busy_seconds: Time with at least one read or write under way.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    busy_seconds: float = 0.0

    def __add__(self, other: FolderTraffic) -> FolderTraffic:
        return FolderTraffic(
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            busy_seconds=self.busy_seconds + other.busy_seconds,
        )

    def __sub__(self, other: FolderTraffic) -> FolderTraffic:
        return FolderTraffic(
            read_bytes=self.read_bytes - other.read_bytes,
            write_bytes=self.write_bytes - other.write_bytes,
            busy_seconds=self.busy_seconds - other.busy_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Cumulative counters of one rank.

    Args:
        steps: Committed steps (filled in by the handler).
        numel: Elements updated in committed steps, in total (filled in by the handler).
        shared_read_bytes: Over the channel that all devices share, to the host: extents that the host reads from
            storage, and parameters that a card has updated.
        shared_write_bytes: Over it, from the host: extents that it writes to storage, and gradients for a card, into
            its memory or through a file on its SSD.
        internal_read_bytes: Inside devices, from storage to accelerator: a card's state, and gradients that go through
            a file.
        internal_write_bytes: Inside devices, from accelerator to storage: a card's state.
        storage_write_bytes: Written to storage by whichever way, all of it: what wears it out. Extents with padding and
            trailers, and gradients that go through a file; not commit records.
        read_calls: Reads issued.
        write_calls: Writes issued.
        read_seconds: Time in reads, summed over threads.
        write_seconds: Time in writes, summed over threads.
        compute_seconds: Time in updates, summed over threads.
        wait_seconds: Time callers spent waiting.
        system_calls: Made for I/O.
        io_cpu_seconds: CPU time of the threads that do I/O.
        cached_read_bytes: State that would have been read, and was in host memory (``dram_cache_bytes``).
        cached_write_bytes: State that would have been written, and is in host memory only.
        padding_bytes: Moved inside devices beside state: what fills blocks up.
        control_bytes: What keeps state whole: commit records and, where devices update, trailers of extents and the
            status of each run. (Trailers that the host reads and writes are part of its extents.)
        folders: Of optimizer state by storage folder, in their order.
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
    wait_seconds: float = 0.0
    system_calls: int = 0
    io_cpu_seconds: float = 0.0
    cached_read_bytes: int = 0
    cached_write_bytes: int = 0
    padding_bytes: int = 0
    control_bytes: int = 0
    folders: tuple[FolderTraffic, ...] = ()

    @classmethod
    def over_shared_channel(cls, counters: native.Counters) -> Traffic:
        """What the native core counted, all of it between host and storage."""
        return cls(
            shared_read_bytes=counters.read_bytes,
            shared_write_bytes=counters.written_bytes,
            storage_write_bytes=counters.written_bytes,
            read_calls=counters.read_calls,
            write_calls=counters.write_calls,
            read_seconds=counters.read_seconds,
            write_seconds=counters.write_seconds,
            compute_seconds=counters.compute_seconds,
            wait_seconds=counters.wait_seconds,
            system_calls=counters.system_calls,
            io_cpu_seconds=counters.io_cpu_seconds,
            cached_read_bytes=counters.cached_read_bytes,
            cached_write_bytes=counters.cached_write_bytes,
            folders=tuple(
                FolderTraffic(
                    read_bytes=file.read_bytes, write_bytes=file.written_bytes, busy_seconds=file.busy_seconds
                )
                for file in counters.files
            ),
        )

    def __add__(self, other: Traffic) -> Traffic:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _numbers()}
        pairs = zip_longest(self.folders, other.folders, fillvalue=FolderTraffic())
        return Traffic(**sums, folders=tuple(one + two for one, two in pairs))

    def __sub__(self, other: Traffic) -> Traffic:
        changes = {name: getattr(self, name) - getattr(other, name) for name in _numbers()}
        pairs = zip_longest(self.folders, other.folders, fillvalue=FolderTraffic())
        return Traffic(**changes, folders=tuple(one - two for one, two in pairs))


def _numbers() -> list[str]:
    """Fields of Traffic that are numbers."""
    return [field.name for field in fields(Traffic) if field.name != "folders"]


class StorageDevice(ABC):
    """Runs batches of tasklets over a rank's state files. One batch at a time; calls come from one thread."""

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
            files: One for each storage folder.
            identity: What every extent carries.
            buffer_bytes: Of the largest extent.
            resident_bytes: Of the extents of the first tasklets, whose state stays in memory from then on.
            written_through: It is written to storage as well.
        """

    @property
    @abstractmethod
    def moves_tasklets(self) -> bool:
        """Whether it can write a tasklet to another file than it read it from.

        If not, each tasklet stays on the storage folder that it was dealt to at first.
        """

    @property
    @abstractmethod
    def updates_from_parameters(self) -> bool:
        """Whether an update can take masters from parameters in memory that are the masters.

        If not, it takes them from storage, as it does for parameters in 16 bit.
        """

    @property
    @abstractmethod
    def description(self) -> str:
        """Of the open device, for a user to read: where it updates and what moves the state."""

    @property
    @abstractmethod
    def ring_bytes(self) -> int:
        """Host memory of the open device's buffers, and of what parameters on a CUDA device travel through."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Host memory of the open device's resident tasklets."""

    @abstractmethod
    def submit(self, batch: native.Batch) -> None:
        """Start a batch and return at once."""

    @abstractmethod
    def extend(self, more: native.Batch) -> None:
        """Add tasklets behind those of the batch, which has not been drained; return at once."""

    @abstractmethod
    def prefer(self, positions: Sequence[int]) -> None:
        """Of these of the batch's tasklets begin those that have not begun before others, in this order."""

    @abstractmethod
    def wait(self, positions: Sequence[int] | None = None) -> None:
        """Return when these of the batch's tasklets, as counted in it, have their outputs in memory; None: all.

        Those that have not begun are preferred to others.

        Raises:
            StorageError: The batch failed. :meth:`drain` must still be called.
            CudaError: The same, copying parameters from or to a CUDA device.
            DeviceError: The same, on a card.
        """

    @abstractmethod
    def drain(self) -> None:
        """Return when nothing of the batch is in flight; then it is over. Raises as :meth:`wait`.

        Ctrl-C ends the wait here, and that of :meth:`wait`, with KeyboardInterrupt: the batch goes on.
        """

    @abstractmethod
    def abandon(self) -> None:
        """End the batch, if there is one, when nothing of it is in flight: what has not begun is not done."""

    @abstractmethod
    def counters(self) -> Traffic:
        """Cumulative counters since :meth:`open`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, release threads and memory; idempotent."""

    def when_written(self, then: Callable[[], object]) -> None:
        """After :meth:`close`: call this once nothing is written to the files any more, which is now.

        Args:
            then: A device that gave a write up calls it when that has returned, some time.
        """
        then()
