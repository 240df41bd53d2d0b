"""Writes entries, from the storages that forward left through the pool."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.activations.files import ActivationFiles
from lightning_smartinfinity.activations.pool import Pool
from lightning_smartinfinity.config import ActivationOffload
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.store.tensor_files import whole_blocks

__all__ = ["Writes"]


class Writes:
    """Entries on their way to storage. None of them is kept alive by it.

    Args:
        settings: How much is offloaded.
        files: Where they are written.
        pool: Where they lie meanwhile.

    Attributes:
        stopped: Whether a write has failed, so that nothing more is offloaded.
    """

    def __init__(self, settings: ActivationOffload, files: ActivationFiles, pool: Pool) -> None:
        self._settings, self._files, self._pool = settings, files, pool
        self._leaving: deque[weakref.ref[Entry]] = deque()  # being written, oldest first
        self.stopped = False

    @property
    def are_in_progress(self) -> bool:
        """Whether there may be writes in progress."""
        return bool(self._leaving)

    def entries(self) -> Iterator[Entry]:
        """Yield the entries that may be being written, oldest first."""
        return (entry for found in self._leaving if (entry := found()) is not None)

    def begin(self, entry: Entry) -> bool:
        """Copy an entry into the pool and start to write it; return whether there was room for it."""
        nbytes = whole_blocks(entry.nbytes)
        if self.stopped or not self._has_place(nbytes) or not self._pool.make_room(nbytes):
            return False
        try:
            stored = self._files.tensors.add(entry.nbytes)
            memory = self._pool.take(entry)
        except StorageError as error:
            self._stop(entry, error)
            return False
        entry.copy_out(memory)
        # From here on others find the entry by its key and its bytes in the pool. Only then is it written, and only
        # then may its storage go, whose address a new one may take.
        ticket = self._files.tensors.write(stored, memory, io_class=native.IoClass.WRITE_BEHIND)
        entry.stored, entry.writing = stored, ticket
        entry.let_go()
        self._leaving.append(weakref.ref(entry))
        return True

    def reap(self) -> None:
        """Finish the writes that have ended."""
        while self._leaving:
            entry = self._leaving[0]()
            if entry is not None and entry.writing is not None:
                if not self._files.tensors.done(entry.writing):
                    return
                self._finish(entry)
            self._leaving.popleft()

    def finish_first(self) -> bool:
        """Wait for the oldest write in progress; return whether there was one."""
        entry = next((each for each in self.entries() if each.writing is not None), None)
        if entry is None:
            return False
        self._finish(entry)
        return True

    def give_up(self, entry: Entry) -> None:
        """Cancel the write of an entry whose bytes stay in the pool, so that nobody reads them from storage."""
        assert entry.writing is not None
        ticket, entry.writing, entry.stored = entry.writing, None, None
        self._files.give_up(ticket)

    def _has_place(self, nbytes: int) -> bool:
        most = self._settings.storage_bytes
        assert not isinstance(most, str), "a size given as text is kept as bytes"
        return most is None or self._files.tensors.storage_bytes + nbytes <= most

    def _finish(self, entry: Entry) -> None:
        """Wait for the write of an entry, whose memory can go afterwards, or stays if the write has failed."""
        assert entry.writing is not None
        try:
            self._files.tensors.finish(entry.writing)
        except StorageError as error:
            entry.writing = entry.stored = None
            self._stop(entry, error)
            return
        entry.writing = None  # not after an interrupt
        self._pool.add_written(entry)

    def _stop(self, entry: Entry, error: StorageError) -> None:
        """Offload nothing more, as an entry could not be written. It stays in memory."""
        self.stopped = True
        failure = entry.failure(error)
        self._files.note(failure)
        warnings.warn(f"{failure} What forward saves stays in memory from now on.", stacklevel=2)
