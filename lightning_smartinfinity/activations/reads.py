"""Has entries in memory when backward wants them, and reads those that it will want next."""

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
    """Entries on their way from storage. None of them is kept alive by it.

    Args:
        files: Where they were written.
        pool: Where they are read to.
        spare_bytes: Returns how many bytes the budget leaves; None if there is no budget.
    """

    def __init__(
        self,
        files: ActivationFiles,
        pool: Pool,
        *,
        spare_bytes: Callable[[], int | None],
    ) -> None:
        self._files, self._pool, self._spare_bytes = files, pool, spare_bytes
        self._ahead: deque[weakref.ref[Entry]] = deque()  # read, or being read, before they are wanted

    @property
    def ahead_bytes(self) -> int:
        """Most bytes that are read before they are wanted."""
        return self._pool.limit // _SHARE_AHEAD

    def forget_gone(self) -> None:
        """Forget entries that are gone."""
        self._ahead = deque(found for found in self._ahead if found() is not None)

    def are_done(self, entry: Entry) -> bool:
        """Return whether an entry is in memory. Whoever wants it is told of a read that failed."""
        if entry.reading is not None and self._files.tensors.done(entry.reading):
            with suppress(StorageError):
                self._files.tensors.finish(entry.reading)
                entry.reading = None
        return entry.memory is not None and entry.reading is None

    def have_in_memory(self, entry: Entry) -> None:
        """Return when an entry is in memory.

        Raises:
            CudaError: A copy from the pool failed.
            StorageError: It cannot be read.
        """
        if entry.memory is None:
            # The device may be behind the host, and copies that it has not run yet use the pool.
            wait = {} if entry.copies is None else {"wait": entry.copies.wait_for_copy_in}
            nbytes = whole_blocks(entry.nbytes)
            self._pool.make_room(nbytes, **wait)
            while not self._is_within_budget(nbytes) and self._pool.drop():
                pass
            try:
                self._start(entry, native.IoClass.AWAITED)
            except StorageError as error:
                raise entry.failure(error) from error
        if entry.reading is not None:
            try:
                self._files.tensors.finish(entry.reading)
            except StorageError as error:
                entry.reading = entry.memory = None
                raise entry.failure(error) from error
            entry.reading = None  # not after an interrupt

    def read_ahead(self, entry: Entry) -> None:
        """Read what backward is expected to want behind an entry, within bounds."""
        forward: Forward = entry.forward
        forward.expect_after(entry)
        while (following := forward.following()) is not None:
            if following.memory is None and not following.is_original and following.stored is not None:
                nbytes = whole_blocks(following.nbytes)
                if not self._may_read_ahead(nbytes):
                    return
                try:
                    self._start(following, native.IoClass.GATHER)
                except StorageError:  # whoever wants it is told
                    return
                self._ahead.append(weakref.ref(following))
            forward.skip()

    def _start(self, entry: Entry, io_class: native.IoClass) -> None:
        assert entry.stored is not None
        memory = self._pool.take(entry)
        entry.memory, entry.reading = memory, self._files.tensors.read(entry.stored, memory, io_class=io_class)

    def _may_read_ahead(self, nbytes: int) -> bool:
        """Return whether so many bytes more may be read before they are wanted. Nothing has to go for them."""
        if not (self._pool.has_room(nbytes) and self._is_within_budget(nbytes)):
            return False
        unused = [entry for found in self._ahead if (entry := found()) is not None and not entry.was_used]
        self._ahead = deque(map(weakref.ref, unused))
        ahead = sum(whole_blocks(entry.nbytes) for entry in unused)
        return not unused or (len(unused) < _MOST_AHEAD and ahead + nbytes <= self.ahead_bytes)

    def _is_within_budget(self, nbytes: int) -> bool:
        spare = self._spare_bytes()
        return spare is None or nbytes <= spare
