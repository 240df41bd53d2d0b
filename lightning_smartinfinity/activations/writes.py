"""Copies entries from their storages into the pool, and writes them to the files."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.entries import Entry, Tickets
from lightning_smartinfinity.activations.files import ActivationFiles
from lightning_smartinfinity.activations.pool import Pool
from lightning_smartinfinity.errors import CudaError, SmartInfinityError, StorageError
from lightning_smartinfinity.settings import ActivationOffload
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks

__all__ = ["Writes"]


class Writes:
    """Writes in progress, and cached entries, which the pool holds and which are not written. It keeps no entry alive.

    Args:
        settings: How much is offloaded.
        files: Files to which entries are written.
        pool: Pool into which entries are copied first.

    Attributes:
        stopped: Whether a write or a copy has failed, so that nothing more is offloaded.
    """

    def __init__(self, settings: ActivationOffload, files: ActivationFiles, pool: Pool) -> None:
        self._settings, self._files, self._pool = settings, files, pool
        self._cached: deque[weakref.ref[Entry]] = deque()  # only in the pool, oldest first
        self._copying: deque[weakref.ref[Entry]] = deque()  # being copied from devices into the pool, oldest first
        self._writing: deque[weakref.ref[Entry]] = deque()  # being written, oldest first
        self.stopped = False

    def entries(self) -> Iterator[Entry]:
        """Yield the entries whose writes may be in progress, oldest first."""
        return (entry for found in self._writing if (entry := found()) is not None)

    def note_packed(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Note that a tensor with the bytes of an entry was packed."""
        try:
            entry.note_packed(tensor)
        except CudaError as error:  # it is unknown when the tensor is computed, so it cannot be evicted
            self.stop(entry.failure(error))

    def begin(self, entry: Entry, *, stays_cached: bool = False) -> bool:
        """Copy an entry into the pool, and start to write it unless it stays cached; return whether there was room.

        A copy from a device is only started, and the write starts when the copy has run.

        Args:
            entry: The entry.
            stays_cached: Whether the entry stays in the pool and is not written yet.
        """
        try:
            if not self._make_room(entry, stays_cached=stays_cached):
                return False
            stored = None if stays_cached else self._files.tensors.add(entry.nbytes)
            memory = self._pool.take(entry)
            entry.copy_out(memory)
        except (StorageError, CudaError) as error:
            self.stop(entry.failure(error))
            return False
        except torch.OutOfMemoryError:
            return False
        # From here on the entry is found by its key, with its bytes in the pool. Only now may it be written and its
        # storage be released, because a new storage may get the same address.
        entry.stored = stored
        if stays_cached:
            self._cached.append(weakref.ref(entry))
        elif entry.copied is None:
            self._start(entry)
        else:
            self._copying.append(weakref.ref(entry))
        entry.release_storage()
        return True

    def forget_gone(self) -> None:
        """Forget deleted entries."""
        self._cached = deque(found for found in self._cached if found() is not None)

    def oldest_cached(self) -> Entry | None:
        """Return the oldest cached entry of the pool."""
        while self._cached:
            entry = self._cached[0]()
            if entry is not None and entry.memory is not None and entry.stored is None:
                return entry
            self._cached.popleft()
        return None

    def write_cached(self, entry: Entry) -> bool:
        """Start to write the oldest cached entry of the pool; return whether storage has a place for it."""
        if self.stopped or not self.has_place(whole_blocks(entry.nbytes)):
            return False
        try:
            entry.stored = self._files.tensors.add(entry.nbytes)
        except StorageError as error:
            self.stop(entry.failure(error))
            return False
        self._cached.popleft()
        self._copying.append(weakref.ref(entry))
        return True

    def reap(self) -> None:
        """Start the writes of entries whose copies from devices have run, and finish the writes that have ended."""
        while self._copying:
            entry = self._copying[0]()
            if entry is not None and not self._end_copy(entry):
                break
            self._copying.popleft()
        while self._writing:
            entry = self._writing[0]()
            if entry is not None and entry.tickets.writing is not None:
                if not self._files.tensors.done(entry.tickets.writing):
                    return
                self._finish(entry)
            self._writing.popleft()

    def finish_first(self) -> bool:
        """Wait for the oldest write in progress, or the oldest copy; return whether there was one."""
        entry = next((each for each in self.entries() if each.tickets.writing is not None), None)
        if entry is None:
            return self._finish_copy()
        self._finish(entry)
        return True

    def give_up(self, entry: Entry) -> None:
        """Cancel the write of an entry, whose bytes stay in the pool and are not read from storage."""
        ticket, entry.tickets.writing, entry.stored = entry.tickets.writing, None, None
        if ticket is not None:
            self._files.give_up(ticket)

    def give_up_all(self, tickets: Tickets) -> None:
        """Cancel the transfers of a deleted entry."""
        if not (self._files.closed or self._files.is_of_parent):
            given_up, tickets.writing, tickets.reading = (tickets.writing, tickets.reading), None, None
            for ticket in given_up:  # at most once, also if an interrupt lets the caller repeat the call
                if ticket is not None:
                    self._files.give_up(ticket)

    def stop(self, failure: SmartInfinityError) -> None:
        """Stop offloading after a failure. Entries that could not be evicted stay in memory."""
        if not self.stopped:
            self.stopped = True
            self._files.note_unwritable(failure)
            warnings.warn(f"{failure} What forward saves stays in memory from now on.", stacklevel=2)

    def has_place(self, nbytes: int) -> bool:
        """Return whether ``storage_bytes`` allows ``nbytes`` more bytes on storage."""
        most = self._settings.storage_bytes
        assert not isinstance(most, str), "a size given as text is kept as bytes"
        return most is None or self._files.tensors.storage_bytes + nbytes <= most

    def _make_room(self, entry: Entry, *, stays_cached: bool) -> bool:
        """Drop older entries, and wait for the device, to make room for an entry; return whether there is room."""
        nbytes = whole_blocks(entry.nbytes)
        if self.stopped or not (stays_cached or self.has_place(nbytes)):
            return False
        if entry.copies is not None and not entry.copies.may_copy_out(nbytes, most=self._pool.under_way_bytes):
            return False
        if self._pool.make_room(nbytes):
            return True
        # The host may run ahead of the device by a whole forward. Without this wait, entries that the device has not
        # computed yet would fill the pool, and nothing more would be evicted.
        if not entry.wait_until_computed():
            return False
        self.reap()
        if self._pool.make_room(nbytes):
            return True
        while nbytes > 0 and (oldest := self.oldest_cached()) is not None and self.write_cached(oldest):
            nbytes -= whole_blocks(oldest.nbytes)
        return False

    def _start(self, entry: Entry) -> None:
        assert entry.stored is not None and entry.memory is not None
        begin, io_class = self._files.tensors.write, native.IoClass.WRITE_BEHIND
        entry.tickets.writing = begin(entry.stored, entry.memory, io_class=io_class)
        self._writing.append(weakref.ref(entry))

    def _finish_copy(self) -> bool:
        """Wait for the oldest copy from a device; return whether there was one."""
        while self._copying:
            entry = self._copying.popleft()()
            if entry is not None and entry.is_being_written:
                self._end_copy(entry, waits=True)
                return True
        return False

    def _end_copy(self, entry: Entry, *, waits: bool = False) -> bool:
        """Start the write of an entry if its copy from the device has run; return False if the copy still runs."""
        if entry.copied is None or entry.stored is None:
            return True
        try:
            if waits:
                entry.copied.synchronize()
            elif not entry.copied.done():
                return False
        except CudaError as error:
            entry.stored = None  # fetching the entry raises the failure of the copy
            self.stop(entry.failure(error))
            return True
        entry.copied = None
        self._start(entry)
        return True

    def _finish(self, entry: Entry) -> None:
        """Wait for the write of an entry. Its memory can be dropped afterwards, unless the write has failed."""
        assert entry.tickets.writing is not None
        try:
            self._files.tensors.finish(entry.tickets.writing)
        except StorageError as error:
            entry.tickets.writing = entry.stored = None
            self.stop(entry.failure(error))
            return
        entry.tickets.writing = None  # not after an interrupt
        self._pool.add_written(entry)
