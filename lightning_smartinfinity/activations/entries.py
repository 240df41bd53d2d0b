"""Entries are what is stored of saved tensors: a storage, or a compact copy of a tensor that covers little of one."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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

__all__ = ["Entry", "Source"]

_SHARE_TO_COMPACT = 2  # one over the share of its storage that a tensor of which a compact copy is made may take


class Source:
    """A storage that tensors were saved from, which this object does not keep alive.

    Args:
        storage: The storage.

    Attributes:
        whole: The entry with all of its bytes, if there is one.
        compact: The entries with compact copies of single tensors.
        compact_bytes: Bytes of all compact copies so far.
        num_holders: Number of entries that keep the storage alive.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # As long as this exists, no other storage has the same address as identity.
        self._weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.nbytes = storage.nbytes()
        self.whole: weakref.ref[Entry] | None = None
        self.compact: dict[Geometry, weakref.ref[Entry]] = {}
        self.compact_bytes = 0
        self.num_holders = 0

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether somebody else keeps the storage alive; meaningful if no entry does."""
        expired: bool = self._weak.expired()
        return not expired

    def entry_for(self, tensor: torch.Tensor) -> Entry | None:
        """Return an entry that has the bytes of a tensor, as they are now."""
        for found in (self.whole, self.compact.get(geometry_of(tensor))):
            entry = None if found is None else found()
            if entry is not None and entry.has_now(tensor):
                return entry
        return None

    def new_entry(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        home: Any,
        *,
        changes: torch.Tensor,
        copies: DeviceCopies | None = None,
    ) -> Entry:
        """Return a new entry for a tensor, which later tensors may share.

        Args:
            tensor: The tensor.
            storage: Its storage.
            home: What is told when the entry is gone.
            changes: What counts the tensor's changes.
            copies: What copies it, unless it lies in host memory.
        """
        least = distinct(tensor)
        nbytes = least.numel() * least.itemsize
        too_much = _SHARE_TO_COMPACT * nbytes >= self.nbytes or self.compact_bytes + nbytes > self.nbytes
        if too_much or overlaps(least.shape, least.stride()):
            entry = Entry(self, storage, self.nbytes, changes=changes, compact=None, home=home, copies=copies)
            self.whole = weakref.ref(entry)
        else:
            self.compact_bytes += nbytes
            geometry = geometry_of(tensor)
            entry = Entry(self, storage, nbytes, changes=changes, compact=geometry, home=home, copies=copies)
            self.compact[geometry] = weakref.ref(entry)
        return entry


class Entry:
    """Bytes that saved tensors share. They lie in the storage itself, in memory of the pool, on storage, or in several.

    The packed objects of autograd own it, and nothing else does.

    Args:
        source: Where the tensors came from.
        storage: The storage, which is kept alive until :meth:`copy_out`.
        nbytes: Bytes to store.
        changes: What counts the changes of the first tensor.
        compact: How that lies in the storage, if the entry is a compact copy of it.
        home: What is told when the entry is gone.
        copies: What copies it to its device and back, unless it lies in host memory.

    Attributes:
        memory: Pool memory that holds the bytes, or is being read or copied into.
        copied: Point behind the copy from the device into :attr:`memory`, as long as that may be in progress.
        loaded: Device memory that holds the bytes, or is being copied into.
        writing: Ticket of the write in progress.
        reading: Ticket of the read in progress.
        stored: Place on storage, from which nothing is read while a write is in progress.
        number: Position in the order in which a forward packed its entries.
        end: Bytes of the forward's entries up to this one.
        was_used: Whether backward has used it.
        unreadable: Why it could not be read, if so.
        forward: Record of the forward that packed it.
    """

    __slots__ = (
        "__weakref__",
        "_compact",
        "_copied_version",
        "_counter",
        "_home",
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
        "reading",
        "source",
        "stored",
        "unreadable",
        "was_used",
        "writing",
    )

    def __init__(
        self,
        source: Source,
        storage: torch.UntypedStorage,
        nbytes: int,
        *,
        changes: torch.Tensor,
        compact: Geometry | None,
        home: Any,
        copies: DeviceCopies | None,
    ) -> None:
        self._counter = changes
        self._packed_version = self._copied_version = -1
        self._points: Points = {}
        self.copies = copies
        self.copied: native.CudaEvent | None = None
        self.loaded: Loaded | None = None
        self._compact = compact
        self._home = home
        self.source = source
        self.nbytes = nbytes
        self.memory: torch.Tensor | None = None
        self.writing: int | None = None
        self.reading: int | None = None
        self.stored: StoredTensor | None = None
        self.number = self.end = 0
        self.was_used = False
        self.unreadable: SmartInfinityError | None = None
        self.forward: Any = None
        self._storage: torch.UntypedStorage | None = storage
        source.num_holders += 1

    def __str__(self) -> str:
        return f"Entry {self.number} of what forward saved ({self.nbytes} bytes)"

    def __del__(self) -> None:
        if not hasattr(self, "_storage"):  # an interrupt came before it was made
            return
        if self._storage is not None:
            self.source.num_holders -= 1
        self._home.entry_is_gone(self)

    def failure(self, error: StorageError | CudaError) -> StorageError | CudaError:
        """Return an error of the same kind that names the entry."""
        return type(error)(f"{self}: {error.problem}", error.remedy)

    @property
    def is_being_written(self) -> bool:
        """Whether the bytes are on their way to storage: being written, or being copied so that they can be."""
        return self.writing is not None or (self.copied is not None and self.stored is not None)

    @property
    def is_timed(self) -> bool:
        """Whether the device's times of the forward and its backward are taken."""
        return self.forward is not None and self.forward.clock is not None

    @property
    def is_original(self) -> bool:
        """Whether the storage itself is kept alive."""
        return self._storage is not None

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether somebody else keeps the storage alive, too."""
        assert self._storage is not None
        others: int = torch._C._storage_Use_Count(self._storage._cdata) - 1  # all entries share one reference
        return others > 0

    def has_now(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes are those that a tensor over the same storage has now."""
        if self._storage is not None:
            return True
        return tensor._version == self._copied_version and shares_changes(self._counter, tensor)

    def note_packed(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was packed whose bytes are those of the entry. Raises CudaError if the device fails."""
        self._packed_version = tensor._version
        if self.copies is not None and self._storage is not None:
            self.copies.mark(self._points)

    def wait_until_computed(self) -> bool:
        """Wait until the device has computed the bytes; return whether they lie on one.

        Raises:
            CudaError: A call, or work on the device, failed.
        """
        for point in self._points.values():
            point.synchronize()
        return bool(self._points)

    def copy_out(self, memory: torch.Tensor) -> None:
        """Copy the bytes, as they were when a tensor was packed last, into memory of the pool.

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
        """Keep the storage alive no longer: the bytes are in :attr:`memory`, or will be."""
        assert self.memory is not None
        self._storage = None
        self._points = {}
        self.source.num_holders -= 1

    def tensor(self, geometry: Geometry) -> torch.Tensor:
        """Return a tensor as it was saved. The bytes must be in memory, or be loaded onto the device."""
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

    def unload(self) -> None:
        """Drop the device memory into which the entry was loaded."""
        if self.loaded is not None:
            assert self.copies is not None
            self.copies.drop(self.loaded)
            self.loaded = None
