"""Pool of host memory through which entries move to storage and back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.activations.files import ActivationFiles
from lightning_smartinfinity.pipeline.layout.tensors import lent_tensor
from lightning_smartinfinity.settings import ActivationOffload
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks

__all__ = ["Pool"]

_LEAST_BYTES = 64 << 20
_SHARE_OF_SAVED = 8  # one over the share of a forward's saved bytes that is the size of the pool
_SHARE_OF_BUDGET = 2  # one over the share of the budget that the pool may use
_SHARE_UNDER_WAY = 16  # one over the share of a forward's saved bytes that may be in copies
_LEAST_UNDER_WAY_BYTES = 64 << 20


class Pool:
    """Lends memory to entries. Entries that are also on storage stay in the pool until their room is needed.

    Args:
        settings: How much is offloaded.
        files: Files of the entries, which error messages name.

    Attributes:
        most_saved: Bytes of the largest forward.
        largest: Bytes of the largest entry.
    """

    def __init__(self, settings: ActivationOffload, files: ActivationFiles) -> None:
        self._settings, self._files = settings, files
        self._memory = native.MemoryPool()
        self._registered: native.MemoryPool | None = None  # for entries on CUDA devices
        # Entries that are in the pool and on storage: those that backward has not used yet, oldest first, and those
        # that it has used.
        self._written: deque[weakref.ref[Entry]] = deque()
        self._used: deque[weakref.ref[Entry]] = deque()
        self.most_saved = self.largest = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the pool has allocated."""
        return self._memory.nbytes + (self._registered.nbytes if self._registered else 0)

    @property
    def lent_bytes(self) -> int:
        """Bytes that entries use."""
        return self._memory.lent_bytes + (self._registered.lent_bytes if self._registered else 0)

    @property
    def limit(self) -> int:
        """Most bytes that entries may use, unless backward needs more at once."""
        host_bytes, budget = self._settings.host_bytes, self._settings.budget_bytes
        if isinstance(host_bytes, int):
            return host_bytes
        automatic = max(_LEAST_BYTES, self.most_saved // _SHARE_OF_SAVED)
        return min(automatic, budget // _SHARE_OF_BUDGET) if isinstance(budget, int) else automatic

    @property
    def under_way_bytes(self) -> int:
        """Most bytes of entries in copies between a device and the pool, for each direction.

        With this many bytes, copies run without a break. Entries in copies use device memory, and so do entries that
        the device has not computed yet because the host runs ahead of it.
        """
        return max(_LEAST_UNDER_WAY_BYTES, self.largest, self.most_saved // _SHARE_UNDER_WAY)

    def apply_limit(self) -> None:
        """Return memory above the limit to the system as soon as it is idle."""
        limit = self.limit
        if self._registered is None:
            self._memory.limit = limit
        else:
            self._memory.limit = max(0, limit - self._registered.lent_bytes)
            self._registered.limit = max(0, limit - self._memory.lent_bytes)

    def give_back(self) -> None:
        """Return all idle memory to the system."""
        self._memory.limit = 0
        if self._registered is not None:
            self._registered.limit = 0

    def take(self, entry: Entry) -> torch.Tensor:
        """Return uninitialized memory for an entry, in whole blocks.

        The memory is registered with CUDA if a device holds the entry. If CUDA refuses that, copies block.

        Raises:
            StorageError: The system is out of memory.
        """
        with storage_errors("Taking host memory for activations in", self._files.tensors.path):
            if entry.copies is None:
                return lent_tensor(self._memory, whole_blocks(entry.nbytes))
            if self._registered is None:
                self._registered = native.MemoryPool(device=entry.copies.link.device)
                self.apply_limit()
            memory = lent_tensor(self._registered, whole_blocks(entry.nbytes))
            entry.copies.link.warn_of_unregistered()
            return memory

    def has_room(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more bytes, in whole blocks, fit into the limit."""
        return self.lent_bytes + nbytes <= self.limit

    def make_room(self, nbytes: int, *, wait: Callable[[], bool] = lambda: False) -> bool:
        """Drop memory of entries that are on storage until ``nbytes`` more bytes fit; return whether they fit.

        Args:
            nbytes: Number of bytes, in whole blocks.
            wait: Waits for memory that is about to be returned, and returns whether there was any. It is called before
                memory is dropped that backward has not used yet.
        """
        while not self.has_room(nbytes):
            if not (_drop_first(self._used) or wait() or _drop_first(self._written)):
                return False
        return True

    def add_written(self, entry: Entry) -> None:
        """Note an entry that is on storage, and that backward has not used yet."""
        self._written.append(weakref.ref(entry))

    def add_used(self, entry: Entry) -> None:
        """Note an entry that is on storage, and that backward has used."""
        self._used.append(weakref.ref(entry))

    def forget_gone(self) -> None:
        """Forget deleted entries."""
        for each in (self._written, self._used):
            living = [found for found in each if found() is not None]
            each.clear()
            each.extend(living)

    def drop(self) -> bool:
        """Drop the memory of one entry that can be read again; return whether there was one."""
        return _drop_first(self._used) or _drop_first(self._written)


def _drop_first(entries: deque[weakref.ref[Entry]]) -> bool:
    while entries:
        entry = entries.popleft()()
        if entry is None or entry.memory is None or entry.stored is None:
            continue
        if not entry.is_being_written and entry.tickets.reading is None:
            entry.memory = None
            return True
    return False
