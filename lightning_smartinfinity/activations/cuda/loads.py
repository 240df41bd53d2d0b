"""Copies entries from the pool to their CUDA devices, when backward uses them and ahead of that.

The memory of an entry is allocated on the stream that uses it, so a copy follows all earlier work of that stream. If
an entry was copied only when backward uses it, the device would wait for every copy. So copies are started after the
use of an earlier entry, and run during the work of that use. Their bytes are bounded, because offloading saves
device memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch

from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.pool import Pool
from lightning_smartinfinity.activations.reads import Reads
from lightning_smartinfinity.errors import CudaError

__all__ = ["Loads"]

_SHARE_OF_POOL = 4  # one over the share of the pool that limits the bytes of entries on devices
_MOST_AHEAD = 8  # entries: checking more takes longer than it saves


class Loads:
    """Entries that were loaded onto devices. It keeps no entry alive.

    Args:
        pool: Pool from which entries are loaded.
        reads: Reads in progress into the pool.
    """

    def __init__(self, pool: Pool, reads: Reads) -> None:
        self._pool, self._reads = pool, reads
        self._loaded: deque[weakref.ref[Entry]] = deque()  # oldest first

    @property
    def nbytes(self) -> int:
        """Bytes of loaded entries."""
        return sum(entry.nbytes for entry in self._entries())

    @property
    def limit(self) -> int:
        """Most bytes of loaded entries, unless the used entry and the next one are larger."""
        return min(self._pool.limit // _SHARE_OF_POOL, self._pool.under_way_bytes)

    def load(self, entry: Entry) -> None:
        """Start to copy an entry to its device, unless it is loaded.

        Raises:
            CudaError: A call, or an earlier copy of the entry, failed.
            OutOfMemoryError: The device is out of memory.
        """
        if entry.loaded is None:
            self._start(entry, wanted=entry)

    def load_ahead(self, entry: Entry) -> None:
        """Load the entry that backward is expected to use after an entry, and more entries within the limit.

        Raises:
            CudaError: A call, or an earlier copy of an entry, failed.
        """
        forward: Forward = entry.forward
        ahead = 0
        for following in islice(forward.expected_after(entry), _MOST_AHEAD):
            if following.copies is None or following.is_original:
                continue
            ahead += following.nbytes
            if following.loaded is not None:
                continue
            is_first = ahead == following.nbytes
            if not (is_first or ahead <= self.limit) or not self._reads.are_done(following):
                return
            try:
                self._start(following, wanted=entry)
            except torch.OutOfMemoryError:  # the entry that is used now may need the memory
                return
            except CudaError as error:
                raise following.failure(error) from error

    def _start(self, entry: Entry, *, wanted: Entry) -> None:
        assert entry.copies is not None and entry.memory is not None
        self._loaded.append(weakref.ref(entry))  # before an interrupt can come
        entry.loaded = entry.copies.copy_in(entry.memory, entry.nbytes, after=entry.copied, is_timed=entry.is_timed)
        if self.nbytes > self.limit:
            for other in self._entries():
                if other.was_used and other is not wanted:
                    other.loaded = None
        self._loaded = deque(map(weakref.ref, self._entries()))

    def _entries(self) -> Iterator[Entry]:
        return (entry for found in self._loaded if (entry := found()) is not None and entry.loaded is not None)
