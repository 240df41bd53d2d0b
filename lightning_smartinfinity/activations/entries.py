"""Entries hold the bytes of saved tensors: a whole storage, or a compact copy of a tensor that covers little of one."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.cuda.copies import DeviceCopies, Loaded, Points
from lightning_smartinfinity.activations.geometry import (
    Geometry,
    distinct,
    geometry_of,
    overlaps,
    shares_changes,
    spread_out,
    view_of,
)
from lightning_smartinfinity.errors import CudaError, SmartInfinityError, StorageError
from lightning_smartinfinity.storage.tensors.tensor_store import StoredTensor

__all__ = ["Entry", "Source", "Tickets"]

_SHARE_TO_COMPACT = 2  # one over the largest share of its storage that a tensor may cover to be copied compactly


class Source:
    """A storage from which tensors were saved. This object does not keep it alive.

    Args:
        storage: The storage.

    Attributes:
        nbytes: Bytes of the storage.
        whole: Entry with all bytes of the storage, if there is one.
        compact: Entries with compact copies of single tensors.
        compact_bytes: Bytes of all compact copies so far.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.whole: weakref.ref[Entry] | None = None
        self.compact: dict[Geometry, weakref.ref[Entry]] = {}
        self.compact_bytes = 0

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether something else keeps the storage alive; valid if no entry does."""
        return self._storage() is not None

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether this is the source of a storage, and not of an earlier one that had the same address."""
        return self._storage() is storage

    def entry_for(self, tensor: torch.Tensor) -> Entry | None:
        """Return an entry with the current bytes of a tensor."""
        for found in (self.whole, self.compact.get(geometry_of(tensor))):
            entry = None if found is None else found()
            if entry is not None and entry.has_now(tensor):
                return entry
        return None

    def new_entry(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        *,
        changes: torch.Tensor,
        copies: DeviceCopies | None = None,
    ) -> Entry:
        """Return a new entry for a tensor, which later tensors may share.

        Args:
            tensor: The tensor.
            storage: Its storage.
            changes: Tensor whose ``_version`` counts the tensor's changes.
            copies: Copies of the device that holds the tensor; None if host memory holds it.
        """
        least = distinct(tensor)
        nbytes = least.numel() * least.itemsize
        too_much = _SHARE_TO_COMPACT * nbytes >= self.nbytes or self.compact_bytes + nbytes > self.nbytes
        if too_much or overlaps(least.shape, least.stride()):
            entry = Entry(self, storage, self.nbytes, changes=changes, compact=None, copies=copies)
            self.whole = weakref.ref(entry)
        else:
            self.compact_bytes += nbytes
            geometry = geometry_of(tensor)
            entry = Entry(self, storage, nbytes, changes=changes, compact=geometry, copies=copies)
            self.compact[geometry] = weakref.ref(entry)
        return entry


class Tickets:
    """Tickets of an entry's transfers in progress, which its store gives up after the entry was deleted.

    Attributes:
        writing: Ticket of the write.
        reading: Ticket of the read.
    """

    __slots__ = ("reading", "writing")

    def __init__(self) -> None:
        self.writing: int | None = None
        self.reading: int | None = None


class Entry:
    """Bytes that saved tensors share, held by torch's storage, memory of the pool, files, or several of these.

    Only the packed objects of autograd own an entry. Its deletion runs no Python code, within which Python
    would ignore an interrupt.

    Args:
        source: Source of the tensors.
        storage: Storage of the tensors, which is kept alive until :meth:`release_storage`.
        nbytes: Bytes to store.
        changes: Tensor whose ``_version`` counts the changes of the first tensor.
        compact: Geometry of the first tensor, if the entry is a compact copy of it.
        copies: Copies of the device that holds the storage; None if host memory holds it.

    Attributes:
        memory: Pool memory that holds the bytes, or into which they are being read or copied.
        copied: Point after the copy from the device into :attr:`memory`, while that may be in progress.
        loaded: Device memory that holds the bytes, or into which they are being copied.
        tickets: Transfers in progress.
        stored: Place in the files, which is not read while a write is in progress.
        number: Position in the order in which a forward packed its entries.
        end: Bytes of the forward's entries up to and including this one.
        was_used: Whether backward has used the entry.
        unreadable: Error of the read that failed, if one has.
        forward: Record of the forward that packed the entry.
    """

    __slots__ = (
        "__weakref__",
        "_compact",
        "_copied_version",
        "_counter",
        "_packed_version",
        "_points",
        "_storage",
        "copied",
        "copies",
        "end",
        "forward",
        "loaded",
        "memory",
        "nbytes",
        "number",
        "source",
        "stored",
        "tickets",
        "unreadable",
        "was_used",
    )

    def __init__(
        self,
        source: Source,
        storage: torch.UntypedStorage,
        nbytes: int,
        *,
        changes: torch.Tensor,
        compact: Geometry | None,
        copies: DeviceCopies | None,
    ) -> None:
        self._counter = changes
        self._packed_version = self._copied_version = -1
        self._points: Points = {}
        self.copies = copies
        self.copied: native.CudaEvent | None = None
        self.loaded: Loaded | None = None
        self._compact = compact
        self.source = source
        self.nbytes = nbytes
        self.memory: torch.Tensor | None = None
        self.tickets = Tickets()
        self.stored: StoredTensor | None = None
        self.number = self.end = 0
        self.was_used = False
        self.unreadable: SmartInfinityError | None = None
        self.forward: Any = None
        self._storage: torch.UntypedStorage | None = storage

    def __str__(self) -> str:
        return f"Entry {self.number} of what forward saved ({self.nbytes} bytes)"

    def failure(self, error: StorageError | CudaError) -> StorageError | CudaError:
        """Return an error of the same kind that names the entry."""
        return type(error)(f"{self}: {error.problem}", error.remedy)

    @property
    def is_being_written(self) -> bool:
        """Whether the bytes are being written, or are being copied from the device to be written."""
        return self.tickets.writing is not None or (self.copied is not None and self.stored is not None)

    @property
    def is_timed(self) -> bool:
        """Whether a device's clock measures the forward and its backward."""
        return self.forward is not None and self.forward.clock is not None

    @property
    def is_original(self) -> bool:
        """Whether the entry keeps the storage alive, so that it was not evicted."""
        return self._storage is not None

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether something else also keeps the storage alive."""
        assert self._storage is not None
        others: int = torch._C._storage_Use_Count(self._storage._cdata) - 1  # all entries share one reference
        return others > 0

    def has_now(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes are the current ones of a tensor over the same storage."""
        if self._storage is not None:
            return True
        return tensor._version == self._copied_version and shares_changes(self._counter, tensor)

    def note_packed(self, tensor: torch.Tensor) -> None:
        """Note that a tensor with the bytes of the entry was packed. Raises CudaError if the device fails."""
        self._packed_version = tensor._version
        if self.copies is not None and self._storage is not None:
            self.copies.mark(self._points)

    def wait_until_computed(self) -> bool:
        """Wait until the device has computed the bytes; return whether a device holds them.

        Raises:
            CudaError: A call, or work on the device, failed.
        """
        for point in self._points.values():
            point.synchronize()
        return bool(self._points)

    def copy_out(self, memory: torch.Tensor) -> None:
        """Copy the bytes into memory of the pool, as they were when a tensor was last packed.

        Raises:
            CudaError: A call for the device failed.
            OutOfMemoryError: The device has no memory for a compact copy.
        """
        assert self._storage is not None
        target = memory[: self.nbytes]
        if self._compact is None:
            source = view_of(self._storage, Geometry(torch.uint8, (self.nbytes,), (1,), 0))
        else:
            source = distinct(view_of(self._storage, self._compact))
            target = target.view(source.dtype).view(source.shape)
        if self.copies is None:
            target.copy_(source)
        else:
            self.copied = self.copies.copy_out(source, memory, after=self._points, is_timed=self.is_timed)
        self._copied_version = self._packed_version
        self.memory = memory

    def release_storage(self) -> None:
        """Release the storage: the bytes are in :attr:`memory`, or will be."""
        assert self.memory is not None
        self._storage = None
        self._points = {}

    def tensor(self, geometry: Geometry) -> torch.Tensor:
        """Return a tensor as it was saved. The bytes must be in memory, or loaded onto the device."""
        if self._storage is not None:
            return view_of(self._storage, geometry)
        if self.copies is None:
            assert self.memory is not None
            memory = self.memory
        else:
            assert self.loaded is not None
            memory = self.copies.take(self.loaded)
        if self._compact is None:
            return view_of(memory.untyped_storage(), geometry)
        assert geometry == self._compact
        return spread_out(memory[: self.nbytes], geometry)
