"""Files of a process's entries, and transfers that were given up."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.settings import ActivationOffload, TransferConfig
from lightning_smartinfinity.storage import measure_activation_space, require_space
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore

__all__ = ["ActivationFiles"]


class ActivationFiles:
    """Files of one process, from :meth:`open` to :meth:`close`.

    Args:
        settings: How much is offloaded.
        folders: Storage folders.
        transfer: Where in the folders, and how, files are opened and used.

    Attributes:
        closed: Whether the files are closed.
    """

    def __init__(self, settings: ActivationOffload, folders: Sequence[Path], *, transfer: TransferConfig) -> None:
        self._settings, self._folders, self._transfer = settings, folders, transfer
        self._process = os.getpid()
        self._tensors: TensorStore | None = None
        self._orphans: list[int] = []  # tickets of transfers that were given up
        self._failed_write: SmartInfinityError | None = None
        self._failed_read: SmartInfinityError | None = None
        self.closed = False

    def open(self) -> None:
        """Open the files; does nothing if they are open.

        Raises:
            ConfigError: The I/O engine is unavailable here.
            StorageFullError: Storage has less room than ``storage_bytes``.
            StorageError: A folder cannot be used, or the files are closed or belong to the parent process.
        """
        self.require_usable()
        if self._tensors is None:
            most = self._settings.storage_bytes
            if isinstance(most, int):
                require_space(measure_activation_space(self._folders, nbytes=most))
            self._tensors = TensorStore(
                self._folders,
                job=self._transfer.job,
                direct_io=self._transfer.file_access,
                io_engine=self._transfer.io_engine,
                io_timeout=self._transfer.io_timeout,
                what="Activations",
                verifies=self._settings.verify,
            )
            self._finalizer = weakref.finalize(self, _close_in, self._process, self._tensors)

    @property
    def was_opened(self) -> bool:
        """Whether the files were ever opened."""
        return self._tensors is not None

    @property
    def tensors(self) -> TensorStore:
        """The open store of tensors."""
        assert self._tensors is not None, "a forward opens the files"
        return self._tensors

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked from the one that owns the files."""
        return os.getpid() != self._process

    def require_usable(self) -> None:
        """Check that entries can be used in this process.

        Raises:
            StorageError: The files are closed or belong to the parent process.
        """
        if self.is_of_parent:
            raise StorageError(
                f"Activations that process {self._process} offloads were used in its forked child {os.getpid()}.",
                "Run forward and backward in the process that began them, or start the child without fork.",
            )
        if self.closed:
            raise StorageError(
                "Activations were removed from storage when their offloading was closed.",
                "Run backward before you close it.",
            )

    def close(self, entries: Iterable[Entry]) -> None:
        """Wait for transfers in flight and close the files, which deletes them; idempotent.

        Args:
            entries: Entries whose writes may be in progress. Writes that have not started are cancelled.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        if self._tensors is not None:
            for entry in () if self.closed else entries:
                if entry.tickets.writing is not None:
                    self._tensors.cancel(entry.tickets.writing)
            self.closed = True
            self._tensors.close()
            self._finalizer.detach()
        self.closed = True

    def give_up(self, ticket: int) -> None:
        """Cancel a transfer. Its memory is released when it has ended."""
        self.tensors.cancel(ticket)
        self._orphans.append(ticket)
        self.finish_orphans()

    def finish_orphans(self) -> None:
        """Finish the transfers that were given up and have ended."""
        if self._tensors is not None and not self.closed:
            self._orphans = [ticket for ticket in self._orphans if not self._has_ended(ticket)]
            self._tensors.release_ended()

    def _has_ended(self, ticket: int) -> bool:
        """Return whether a transfer that was given up has ended, and finish it then."""
        if not self.tensors.done(ticket):
            return False
        with suppress(StorageError):  # the result of the transfer is not needed
            self.tensors.finish(ticket)
        return True

    def note_unwritable(self, failure: SmartInfinityError) -> None:
        """Note why an entry could not be written, for :meth:`take_failure`, unless there is an earlier failure."""
        self._failed_write = self._failed_write or failure

    def note_unreadable(self, failure: SmartInfinityError) -> None:
        """Note why an entry could not be read, for :meth:`take_failure`, unless there is an earlier failure."""
        self._failed_read = self._failed_read or failure

    def forget_failed_reads(self) -> None:
        """Forget why entries could not be read."""
        self._failed_read = None

    def take_failure(self) -> SmartInfinityError | None:
        """Return the first failed read since the last call, or else the first failed write, and forget both."""
        failure = self._failed_read or self._failed_write
        self._failed_read = self._failed_write = None
        return failure


def _close_in(process: int, tensors: TensorStore) -> None:
    # A forked child runs exit handlers, too; the files are its parent's.
    if os.getpid() == process:
        tensors.close()
