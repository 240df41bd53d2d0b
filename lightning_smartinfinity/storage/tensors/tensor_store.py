"""Tensors of any length on storage; a tensor's space is freed when nothing refers to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from lightning_smartinfinity import native
from lightning_smartinfinity.settings import IO_TIMEOUT
from lightning_smartinfinity.storage.io.deadlines import in_time
from lightning_smartinfinity.storage.io.files import LimitedCalls
from lightning_smartinfinity.storage.io.os_errors import (
    failure_error,
    in_milliseconds,
    require_io_engine,
    storage_error,
    storage_errors,
)
from lightning_smartinfinity.storage.tensors.tensor_files import UnnamedFiles

__all__ = ["StoredTensor", "TensorStore"]

T = TypeVar("T")

_IO_THREADS_PER_FILE = 4


class Memory(Protocol):
    """Block-aligned memory of whole blocks, such as a uint8 tensor."""

    def data_ptr(self) -> int:
        """Return the address."""
        ...

    def numel(self) -> int:
        """Return the number of bytes."""
        ...


# The memory of transfers that were given up: the kernel may still use it.
_NEVER_FREED: list[dict[int, Memory]] = []


class StoredTensor:
    """One tensor on storage. Its space is freed when nothing refers to this object any more.

    Args:
        nbytes: Size of the tensor in bytes.
        extent: Place of the tensor on storage, in whole blocks.
    """

    def __init__(self, nbytes: int, extent: native.TensorExtent) -> None:
        self.nbytes = nbytes
        self.extent = extent


class TensorStore:
    """A rank's tensors of one kind, from construction to :meth:`close`.

    Verified reads raise if they do not find what was written. Transfers of the same blocks keep their order.

    Args:
        folders: Storage folders.
        job: ``TransferConfig.job``.
        direct_io: ``TransferConfig.file_access``.
        io_engine: ``TransferConfig.io_engine``.
        io_timeout: ``TransferConfig.io_timeout``.
        what: Name of the tensors in messages.
        verifies: Whether reads are checked against the checksums of the written data.

    Raises:
        ConfigError: The I/O engine is unavailable here.
        StorageTimeoutError: A disk does not answer.
        StorageError: A folder cannot be used.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        job: str,
        direct_io: str,
        io_engine: str = "auto",
        io_timeout: float = IO_TIMEOUT,
        what: str = "Parameters",
        verifies: bool = True,
    ) -> None:
        require_io_engine(io_engine)
        self._what = what
        self._files = in_time(
            partial(UnnamedFiles, folders, job=job, direct_io=direct_io),
            doing="Creating files in",
            path=Path(folders[0]).absolute(),
            seconds=io_timeout,
            undo=lambda made: made.close(),
        )
        if io_engine == "auto" and not all(file.direct for file in self._files.files):
            io_engine = "plain"  # an automatic choice cannot depend on the files, which come with each request
        try:
            with storage_errors("Starting threads for", folders[0]):
                self.core = native.TensorStore(
                    self._files.files,
                    io_threads=_IO_THREADS_PER_FILE * len(folders),
                    io_engine=io_engine,
                    timeout_ms=in_milliseconds(io_timeout),
                    verifies=verifies,
                )
        except BaseException:
            self._files.close()
            raise
        self._calls = LimitedCalls(self._files.files, seconds=io_timeout)
        # The memory of transfers that may be in progress, by ticket; it must stay alive until they have ended.
        self._unfinished: dict[int, Memory] = {}
        self._abandoned: set[int] = set()  # tickets whose memory the kernel may still use

    @property
    def path(self) -> str:
        """Path of the first file."""
        return self._files.files[0].path

    @property
    def storage_bytes(self) -> int:
        """Bytes of all tensors on storage."""
        return self.core.taken_bytes

    def add(self, nbytes: int) -> StoredTensor:
        """Reserve space for a tensor, whose bytes are zero until they are written.

        Raises:
            StorageFullError: There is too little space.
            StorageTimeoutError: The disk does not answer.
        """
        free = self.core.allocate_free(nbytes)
        if free is not None:
            return StoredTensor(nbytes, free)
        try:
            return StoredTensor(nbytes, self._calls("Growing", Path(self.path), self.core.allocate, nbytes))
        except OSError as error:
            problem = f"{self._what} in {error.filename!r}: {error.strerror}."
            raise storage_error(error.errno or 0, problem=problem) from error

    def keep_length(self) -> None:
        """From now on, never shorten the files below the length that the current tensors need.

        Tensors that are added and dropped repeatedly then do not wait for the disk, which changes a file's length only
        after the transfers that it has begun.
        """
        self.core.keep_length()

    def read(
        self,
        stored: StoredTensor,
        memory: Memory,
        *,
        offset: int = 0,
        io_class: native.IoClass = native.IoClass.AWAITED,
    ) -> int:
        """Start reading whole blocks from byte ``offset`` on; return a ticket for :meth:`finish`.

        Args:
            stored: The tensor to read.
            memory: Destination of the bytes, kept alive until the transfer has ended.
            offset: Offset in bytes, a multiple of the block size.
            io_class: Urgency of the transfer.
        """
        return self._start(self.core.read, stored, memory, offset, io_class)

    def write(
        self,
        stored: StoredTensor,
        memory: Memory,
        *,
        offset: int = 0,
        io_class: native.IoClass = native.IoClass.AWAITED,
    ) -> int:
        """Start writing; arguments and result are those of :meth:`read`."""
        return self._start(self.core.write, stored, memory, offset, io_class)

    def done(self, ticket: int) -> bool:
        """Return whether a transfer has ended, so that :meth:`finish` would not wait."""
        return self.core.done(ticket)

    def cancel(self, ticket: int) -> bool:
        """Start no further part of a transfer; return whether a part was left out. Call :meth:`finish` as usual."""
        return self.core.cancel(ticket)

    def finish(self, ticket: int) -> None:
        """Wait until a transfer has ended; meanwhile it is the most urgent one.

        Ctrl-C ends the wait, but not the transfer, whose memory is kept. A ticket may be finished more than once.

        Raises:
            StorageCorruptError: The bytes that were read differ from those that were written.
            StorageError: The transfer failed.
        """
        failure = self.core.wait(ticket)
        if failure is not None and failure.kind == "timeout":
            self._abandoned.add(ticket)
        if ticket not in self._abandoned:
            self._release(ticket)
        if failure is not None:
            raise failure_error(failure, what=self._what)

    def release_ended(self) -> None:
        """Release the memory of the oldest transfers that have ended, because an interrupt may have lost tickets."""
        while (oldest := self._oldest()) is not None and self.core.done(oldest):
            if self.core.counters().num_abandoned:  # they count as ended, but their memory is in use
                return
            self._release(oldest)

    def counters(self) -> native.Counters:
        """Return the cumulative counters."""
        return self.core.counters()

    def close(self) -> None:
        """Wait for transfers in flight and close the files, which deletes them; idempotent.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        self.core.close()
        if self.core.counters().num_abandoned:
            _NEVER_FREED.append(self._unfinished)
        self._unfinished = {}
        self._calls("Closing", Path(self.path), self._files.close)

    def _start(
        self, begin: Callable[..., int], stored: StoredTensor, memory: Memory, offset: int, io_class: native.IoClass
    ) -> int:
        self.release_ended()
        address, nbytes = memory.data_ptr(), memory.numel()
        start = partial(begin, offset=offset, address=address, nbytes=nbytes, io_class=io_class)
        tickets: list[int] = []
        try:
            # A signal handler may raise after a call, before its result is assigned, but not within extend().
            tickets.extend(map(start, [stored.extent]))
        finally:
            self._unfinished.update(dict.fromkeys(tickets, memory))
        return tickets[0]

    def _oldest(self) -> int | None:
        while True:
            with suppress(RuntimeError):  # another thread has begun or released a transfer meanwhile
                return next(iter(self._unfinished), None)

    def _release(self, ticket: int) -> None:
        self._unfinished.pop(ticket, None)
