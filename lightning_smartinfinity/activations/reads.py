"""Reads entries into the pool when backward uses them, and reads ahead."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.activations.files import ActivationFiles
from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.pool import Pool
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks

__all__ = ["Reads"]

_SHARE_AHEAD = 2  # one over the share of the pool that is read ahead
_MOST_AHEAD = 64  # entries


class Reads:
    """Reads in progress. It keeps no entry alive.

    Args:
        files: Files to which entries were written.
        pool: Pool into which entries are read.
        spare_bytes: Returns the unused bytes of the budget; None if there is no budget.
    """

    def __init__(
        self,
        files: ActivationFiles,
        pool: Pool,
        *,
        spare_bytes: Callable[[], int | None],
    ) -> None:
        self._files, self._pool, self._spare_bytes = files, pool, spare_bytes
        self._ahead: deque[weakref.ref[Entry]] = deque()  # read, or being read, before backward uses them

    @property
    def ahead_bytes(self) -> int:
        """Most bytes to read ahead."""
        return self._pool.limit // _SHARE_AHEAD

    def forget_gone(self) -> None:
        """Forget deleted entries."""
        self._ahead = deque(found for found in self._ahead if found() is not None)

    def are_done(self, entry: Entry) -> bool:
        """Return whether an entry is in memory. :meth:`have_in_memory` raises the error of a failed read."""
        if entry.tickets.reading is not None and self._files.tensors.done(entry.tickets.reading):
            with suppress(StorageError):
                self._files.tensors.finish(entry.tickets.reading)
                entry.tickets.reading = None
        return entry.memory is not None and entry.tickets.reading is None

    def have_in_memory(self, entry: Entry) -> None:
        """Read an entry if necessary, and wait until it is in memory.

        Raises:
            CudaError: A copy from the pool failed.
            StorageError: The entry cannot be read.
        """
        if entry.memory is None:
            # The host may run ahead of the device, whose pending copies use the pool.
            wait = {} if entry.copies is None else {"wait": entry.copies.wait_for_copy_in}
            nbytes = whole_blocks(entry.nbytes)
            self._pool.make_room(nbytes, **wait)
            while not self._is_within_budget(nbytes) and self._pool.drop():
                pass
            try:
                self._start(entry, native.IoClass.AWAITED)
            except StorageError as error:
                raise entry.failure(error) from error
        if entry.tickets.reading is not None:
            try:
                self._files.tensors.finish(entry.tickets.reading)
            except StorageError as error:
                entry.tickets.reading = entry.memory = None
                raise entry.failure(error) from error
            entry.tickets.reading = None  # not after an interrupt

    def read_ahead(self, entry: Entry) -> None:
        """Read the entries that backward is expected to use after an entry, within bounds."""
        forward: Forward = entry.forward
        forward.expect_after(entry)
        while (following := forward.following()) is not None:
            if following.memory is None and not following.is_original and following.stored is not None:
                nbytes = whole_blocks(following.nbytes)
                if not self._may_read_ahead(nbytes):
                    return
                try:
                    self._start(following, native.IoClass.GATHER)
                except StorageError:  # raised again when backward uses the entry
                    return
                self._ahead.append(weakref.ref(following))
            forward.skip()

    def _start(self, entry: Entry, io_class: native.IoClass) -> None:
        assert entry.stored is not None
        memory = self._pool.take(entry)
        entry.memory, entry.tickets.reading = memory, self._files.tensors.read(entry.stored, memory, io_class=io_class)

    def _may_read_ahead(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more bytes may be read ahead without dropping anything."""
        if not (self._pool.has_room(nbytes) and self._is_within_budget(nbytes)):
            return False
        unused = [entry for found in self._ahead if (entry := found()) is not None and not entry.was_used]
        self._ahead = deque(map(weakref.ref, unused))
        ahead = sum(whole_blocks(entry.nbytes) for entry in unused)
        return not unused or (len(unused) < _MOST_AHEAD and ahead + nbytes <= self.ahead_bytes)

    def _is_within_budget(self, nbytes: int) -> bool:
        spare = self._spare_bytes()
        return spare is None or nbytes <= spare
