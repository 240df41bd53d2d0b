"""Parameters on storage: whole ones to and from block-aligned host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.store import ParameterFiles, Place
from lightning_smartinfinity.store.os_errors import failure_error, require_io_engine, storage_errors

__all__ = ["ParameterStore", "StoredParameter"]

_IO_THREADS_PER_FILE = 4


class StoredParameter:
    """One parameter's partition on storage. Its place is free again when nothing refers to this object any more.

    Args:
        nbytes: Of the partition.
        place: Where it lies.
    """

    def __init__(self, nbytes: int, place: Place) -> None:
        self.nbytes = nbytes
        self.place = place


class ParameterStore:
    """This rank's parameters on storage, from construction to :meth:`close`.

    Args:
        folders: Storage folders.
        job: ``TransferConfig.job``.
        rank: Of this process.
        direct_io: ``TransferConfig.file_access``.
        io_engine: ``TransferConfig.io_engine``.

    Raises:
        ConfigError: The I/O engine is not to be had here.
        StorageError: A folder cannot be used or is locked.
    """

    def __init__(
        self, folders: Sequence[Path], *, job: str, rank: int, direct_io: str, io_engine: str = "auto"
    ) -> None:
        require_io_engine(io_engine)
        self._files = ParameterFiles(folders, job=job, rank=rank, direct_io=direct_io)
        if io_engine == "auto" and not all(file.direct for file in self._files.files):
            io_engine = "plain"  # the queue is told of files only with each request
        try:
            with storage_errors("Starting threads for", folders[0]):
                self.queue = native.FileQueue(io_threads=_IO_THREADS_PER_FILE * len(folders), io_engine=io_engine)
        except BaseException:
            self._files.close()
            raise
        # Transfers that have not been waited for to their end, with their memory, which must stay until then.
        self._open: dict[int, torch.Tensor] = {}
        self._interrupted = False
        self._failed: dict[int, native.Failure] = {}  # of those, once they had to be waited for

    @property
    def path(self) -> str:
        """Of the first file."""
        return self._files.files[0].path

    @property
    def storage_bytes(self) -> int:
        """Bytes of all parameters on storage."""
        return self._files.taken_bytes

    def add(self, nbytes: int) -> StoredParameter:
        """Reserve room for a partition.

        Raises:
            StorageFullError: There is none.
        """
        stored = StoredParameter(nbytes, self._files.allocate(nbytes))
        weakref.finalize(stored, self._files.free, stored.place).atexit = False
        return stored

    def read(self, stored: StoredParameter, memory: torch.Tensor, *, offset: int = 0) -> int:
        """Start reading whole blocks from byte ``offset`` on; for :meth:`finish`.

        Args:
            stored: What to read.
            memory: uint8, block-aligned, whole blocks; it is kept until then.
            offset: Whole blocks.
        """
        return self._start(self.queue.read, stored, memory, offset)

    def write(self, stored: StoredParameter, memory: torch.Tensor, *, offset: int = 0) -> int:
        """Start writing, as :meth:`read`."""
        return self._start(self.queue.write, stored, memory, offset)

    def finish(self, ticket: int) -> None:
        """Return when a transfer is complete.

        Ctrl-C ends the wait, not the transfer: its memory is kept, and the next transfer starts, or raises, when it is
        complete. A transfer that was finished already is complete.

        Raises:
            StorageError: It failed.
        """
        failure = self._failed.pop(ticket, None) or self._wait(ticket)
        if failure is not None:
            raise failure_error(failure, what="Parameters")

    def traffic(self) -> Traffic:
        """Cumulative counters."""
        return Traffic.over_shared_channel(self.queue.counters())

    def close(self) -> None:
        """Wait for what is in flight and remove the files; idempotent."""
        self.queue.close()
        self._open.clear()
        self._files.close()

    def _start(self, begin: Callable[..., int], stored: StoredParameter, memory: torch.Tensor, offset: int) -> int:
        if self._interrupted:
            self._settle()
        file = self._files.files[stored.place.file]
        where = stored.place.offset + offset
        ticket = begin(file, offset=where, address=memory.data_ptr(), nbytes=memory.numel())
        self._open[ticket] = memory
        return ticket

    def _wait(self, ticket: int) -> native.Failure | None:
        try:
            failure = self.queue.wait(ticket)
        except BaseException:  # what a signal handler raises
            self._interrupted = True
            raise
        self._open.pop(ticket, None)
        return failure

    def _settle(self) -> None:
        # Nobody may ever ask again for the transfer whose wait was interrupted, and what comes next could overtake it.
        for ticket in list(self._open):
            failure = self._wait(ticket)
            if failure is not None:
                self._failed[ticket] = failure
        self._interrupted = False
        if self._failed:
            raise failure_error(next(iter(self._failed.values())), what="Parameters")
