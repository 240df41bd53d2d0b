"""Transfers whole blocks of parameters between storage and block-aligned host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.config import IO_TIMEOUT
from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.store import ParameterFiles, Place
from lightning_smartinfinity.store.os_errors import failure_error, in_milliseconds, require_io_engine, storage_errors

__all__ = ["ParameterStore", "StoredParameter"]

_IO_THREADS_PER_FILE = 4
# The memory of transfers that were given up: the kernel may still use it.
_NEVER_FREED: list[dict[int, torch.Tensor]] = []


class StoredParameter:
    """One parameter's partition on storage. Its place becomes free when nothing refers to this object any more.

    Args:
        nbytes: Size of the partition in bytes.
        place: Place of the partition on storage.
    """

    def __init__(self, nbytes: int, place: Place) -> None:
        self.nbytes = nbytes
        self.place = place


class ParameterStore:
    """This rank's parameters on storage, from construction to :meth:`close`.

    Args:
        folders: Storage folders.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        direct_io: ``TransferConfig.file_access``.
        io_engine: ``TransferConfig.io_engine``.
        io_timeout: ``TransferConfig.io_timeout``.

    Raises:
        ConfigError: The I/O engine is unavailable here.
        StorageError: A folder cannot be used or is locked.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        job: str,
        rank: int,
        direct_io: str,
        io_engine: str = "auto",
        io_timeout: float = IO_TIMEOUT,
    ) -> None:
        require_io_engine(io_engine)
        self._files = ParameterFiles(folders, job=job, rank=rank, direct_io=direct_io)
        if io_engine == "auto" and not all(file.direct for file in self._files.files):
            io_engine = "plain"  # the queue learns of files with each request only
        try:
            with storage_errors("Starting threads for", folders[0]):
                self.queue = native.FileQueue(
                    io_threads=_IO_THREADS_PER_FILE * len(folders),
                    io_engine=io_engine,
                    timeout_ms=in_milliseconds(io_timeout),
                )
        except BaseException:
            self._files.close()
            raise
        # The memory of transfers that may be in progress, by ticket; it must stay alive until they are complete.
        self._unfinished: dict[int, torch.Tensor] = {}
        self._interrupted = False
        self._failed: dict[int, native.Failure] = {}  # failures that finish() has not yet raised, by ticket

    @property
    def path(self) -> str:
        """Path of the first file."""
        return self._files.files[0].path

    @property
    def storage_bytes(self) -> int:
        """Bytes of all parameters on storage."""
        return self._files.taken_bytes

    def add(self, nbytes: int) -> StoredParameter:
        """Reserve room for a partition.

        Raises:
            StorageFullError: There is too little space.
        """
        stored = StoredParameter(nbytes, self._files.allocate(nbytes))
        weakref.finalize(stored, self._files.free, stored.place).atexit = False
        return stored

    def read(self, stored: StoredParameter, memory: torch.Tensor, *, offset: int = 0) -> int:
        """Start reading whole blocks from byte ``offset`` on; return a ticket for :meth:`finish`.

        Args:
            stored: The parameter to read.
            memory: uint8 tensor, block-aligned, of whole blocks; it is kept alive until the transfer is complete.
            offset: Offset in bytes, a multiple of the block size.
        """
        return self._start(self.queue.read, stored, memory, offset)

    def write(self, stored: StoredParameter, memory: torch.Tensor, *, offset: int = 0) -> int:
        """Start writing; arguments and result are those of :meth:`read`."""
        return self._start(self.queue.write, stored, memory, offset)

    def finish(self, ticket: int) -> None:
        """Return when a transfer is complete.

        Ctrl-C ends the wait, not the transfer: its memory is kept, and before the next transfer starts, the store waits
        for it and raises its error. A ticket may be finished more than once.

        Raises:
            StorageError: The transfer failed.
        """
        failure = self._failed.pop(ticket, None) or self._wait(ticket)
        if failure is not None:
            raise failure_error(failure, what="Parameters")

    def traffic(self) -> Traffic:
        """Return the cumulative counters."""
        return Traffic.over_shared_channel(self.queue.counters())

    def close(self) -> None:
        """Wait for transfers in flight and remove the files; idempotent."""
        self.queue.close()
        if self.queue.counters().num_given_up:
            _NEVER_FREED.append(self._unfinished)
        self._unfinished = {}
        self._files.close()

    def _start(self, begin: Callable[..., int], stored: StoredParameter, memory: torch.Tensor, offset: int) -> int:
        if self._interrupted:
            self._finish_interrupted()
        file = self._files.files[stored.place.file]
        where = stored.place.offset + offset
        ticket = begin(file, offset=where, address=memory.data_ptr(), nbytes=memory.numel())
        self._unfinished[ticket] = memory
        return ticket

    def _wait(self, ticket: int) -> native.Failure | None:
        try:
            failure = self.queue.wait(ticket)
        except BaseException:  # a signal handler may raise anything
            self._interrupted = True
            raise
        if failure is None or failure.kind != "timeout":
            self._unfinished.pop(ticket, None)
        return failure

    def _finish_interrupted(self) -> None:
        # A transfer whose wait was interrupted may never be finished by its caller, and the next one could overtake it.
        for ticket in list(self._unfinished):
            failure = self._wait(ticket)
            if failure is not None:
                self._failed[ticket] = failure
        self._interrupted = False
        if self._failed:
            raise failure_error(next(iter(self._failed.values())), what="Parameters")
