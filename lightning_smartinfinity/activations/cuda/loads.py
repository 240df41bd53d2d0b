"""Copies entries from the pool onto their CUDA devices: what backward wants, and some of what it will want next.

What is wanted could be copied when it is wanted only. But its memory is taken on the stream that wants it, so the copy
follows all work that this stream was given before, and the device would wait for every copy. So copies are started
behind the use of an earlier entry, and run beside the work that this use is for. They are bounded in bytes, as device
memory is what offloading saves.
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

_SHARE_OF_POOL = 4  # one over the size of the pool, in bytes of entries that this keeps on devices
_MOST_AHEAD = 8  # entries: looking at more takes longer than it saves


class Loads:
    """Entries on devices. None of them is kept alive by it.

    Args:
        pool: Where they lie before.
        reads: Reads in progress into the pool.
    """

    def __init__(self, pool: Pool, reads: Reads) -> None:
        self._pool, self._reads = pool, reads
        self._loaded: deque[weakref.ref[Entry]] = deque()  # oldest first

    @property
    def nbytes(self) -> int:
        """Bytes of entries that lie in device memory."""
        return sum(entry.nbytes for entry in self._entries())

    @property
    def limit(self) -> int:
        """Most bytes on devices, unless one entry that is used and the next one are larger."""
        return min(self._pool.limit // _SHARE_OF_POOL, self._pool.under_way_bytes)

    def load(self, entry: Entry) -> None:
        """Start to copy an entry onto its device, unless it is there.

        Raises:
            CudaError: A call, or an earlier copy of the entry, failed.
            OutOfMemoryError: The device has no memory.
        """
        if entry.loaded is None:
            self._start(entry, wanted=entry)

    def load_ahead(self, entry: Entry) -> None:
        """Load what backward is expected to want behind an entry: the next one, and more within the limit.

        Raises:
            CudaError: A call, or an earlier copy of an entry, failed.
        """
        forward: Forward = entry.forward
        ahead = 0
        for following in islice(forward.behind(entry), _MOST_AHEAD):
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
            except torch.OutOfMemoryError:  # what is wanted now may need the memory
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
                    other.unload()
        self._loaded = deque(map(weakref.ref, self._entries()))

    def _entries(self) -> Iterator[Entry]:
        return (entry for found in self._loaded if (entry := found()) is not None and entry.loaded is not None)
