"""Evicts entries to storage in forward, and has them in memory when backward uses them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from lightning_smartinfinity.activations.cuda.clock import DeviceClock
from lightning_smartinfinity.activations.cuda.devices import Devices
from lightning_smartinfinity.activations.cuda.loads import Loads
from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.activations.eviction import LEAST_FREED, Eviction
from lightning_smartinfinity.activations.files import ActivationFiles
from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.geometry import Geometry
from lightning_smartinfinity.activations.pool import Pool
from lightning_smartinfinity.activations.rates import Rates
from lightning_smartinfinity.activations.reads import Reads
from lightning_smartinfinity.activations.traffic import ActivationTraffic
from lightning_smartinfinity.activations.writes import Writes
from lightning_smartinfinity.common.freed_memory import FreedMemory
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.settings import ActivationOffload, TransferConfig

__all__ = ["ActivationStore"]


class ActivationStore:
    """One process's entries on storage, and the pool of host memory through which they move.

    The store has only weak references to entries: an entry's memory and place are free when the graph drops it. If
    transfers of the entry are in progress, the next call gives them up. The pool keeps the newest entries, and the
    oldest are written. Written entries stay in the pool until their room is needed.

    Callers hold :attr:`lock`.

    Args:
        settings: How much is offloaded.
        folders: Storage folders.
        transfer: Where in the folders, and how, files are opened and used.

    Attributes:
        files: Files of the entries.
        pool: Pool of host memory.
        writes: Writes in progress, and cached entries.
        reads: Reads in progress.
        loads: Entries that were loaded onto devices.
        devices: Devices that have held entries.
        eviction: Evicts entries from memory.
        lock: Lock for entries and for this store.
    """

    def __init__(self, settings: ActivationOffload, folders: Sequence[Path], *, transfer: TransferConfig) -> None:
        self._settings = settings
        self.files = ActivationFiles(settings, folders, transfer=transfer)
        self.pool = Pool(settings, self.files)
        self._rates = Rates()
        self.writes = Writes(settings, self.files, self.pool)
        self.reads = Reads(self.files, self.pool, spare_bytes=self._spare_bytes)
        self.loads = Loads(self.pool, self.reads)
        self.devices = Devices(self._rates, stop=self.writes.stop)
        self._freed_memory = FreedMemory(LEAST_FREED)
        self._traffic = ActivationTraffic()
        self.eviction = Eviction(
            settings, self.pool, self.writes, traffic=self._traffic, freed_memory=self._freed_memory
        )
        self.lock = threading.RLock()

    # ---- life

    def close(self) -> None:
        """Wait for transfers in flight and close the files, which deletes them; idempotent.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        if not self.files.is_of_parent:
            self.eviction.forget_gone()
            self.devices.close()
            self.files.close(self.writes.entries())
            self.pool.give_back()

    # ---- state

    @property
    def is_on_processor(self) -> bool:
        """Whether host memory holds all tensors saved so far."""
        return not self.devices

    def start_clock(self) -> DeviceClock | None:
        """Return a clock of the first device that has held entries; None if host memory held all."""
        return next(map(DeviceClock, self.devices.names()), None)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for backward.

        These are storages that entries keep alive, memory of the pool in use, and entries that were copied back to
        devices.
        """
        self.files.finish_orphans()
        self.devices.reap()
        return self.eviction.nbytes + self.pool.lent_bytes + self.loads.nbytes

    def _spare_bytes(self) -> int | None:
        budget = self._settings.budget_bytes
        return budget - self.held_bytes if isinstance(budget, int) else None

    @property
    def storage_bytes(self) -> int:
        """Bytes of all entries on storage."""
        return self.files.tensors.storage_bytes if self.files.was_opened and not self.files.closed else 0

    def traffic(self) -> ActivationTraffic:
        """Return the cumulative counters."""
        self.files.finish_orphans()
        if not self.files.was_opened:
            return replace(self._traffic)
        counters = self.files.tensors.counters()
        return replace(self._traffic, written_bytes=counters.written_bytes, read_bytes=counters.read_bytes)

    def update_rates(self) -> Rates:
        """Return the rates of storage and of copies, measured since the last call."""
        self._rates.update(self.files.tensors.counters())
        return self._rates

    # ---- forward

    def begin(self, forward: Forward) -> None:
        """Begin a forward, whose entries are admitted next."""
        self.pool.forget_gone()
        self.writes.forget_gone()
        self.reads.forget_gone()
        self.eviction.begin(forward)

    def admit(self, entry: Entry, tensor: torch.Tensor, forward: Forward) -> None:
        """Add a new entry that was made for a tensor, and evict the oldest ones."""
        self.eviction.add(entry, tensor, forward)
        self._reap()
        self.eviction.evict_oldest(forward, held_bytes=lambda: self.held_bytes)

    def share(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Note a saved tensor that shares an existing entry."""
        self.writes.note_packed(entry, tensor)
        self._traffic.deduplicated += 1

    def end(self, forward: Forward) -> None:
        """End a forward, and count the entries that are still in memory."""
        if forward.ended is None:
            forward.ended = time.perf_counter()
            if forward.clock is not None:
                forward.clock.end()
        self._reap()
        forward.count_kept(self._traffic)
        if forward.sizes and not self.files.closed:
            self.files.tensors.keep_length()  # the next forward needs about as much

    # ---- backward

    def fetch(self, entry: Entry, geometry: Geometry) -> torch.Tensor:
        """Return a tensor of an entry, and read ahead the entries that backward is expected to use next.

        Raises:
            CudaError: The entry cannot be copied onto its device. Offloading stops.
            StorageError: The entry cannot be read.
        """
        try:
            return self._fetch(entry, geometry)
        except CudaError as error:
            failure = entry.failure(error)
            self.writes.stop(failure)
            raise failure from error

    def _fetch(self, entry: Entry, geometry: Geometry) -> torch.Tensor:
        is_first_use = not entry.was_used
        if is_first_use:
            entry.forward.use(entry, time.perf_counter())
            if entry.copies is None and entry.stored is not None:
                # Backward frees about as much as it uses. Without offloading, nothing is done, as in plain autograd.
                self._freed_memory.add(entry.nbytes)
        self._reap()
        was_in_memory = entry.memory is not None
        clock: DeviceClock | None = entry.forward.clock
        waiting = nullcontext if clock is None or not is_first_use else clock.waiting
        if not entry.is_original:
            if entry.is_being_written:
                self.writes.give_up(entry)
                self._traffic.forwarded_bytes += entry.nbytes
            if entry.loaded is None:
                began = time.perf_counter()
                with waiting():
                    self.reads.have_in_memory(entry)
                waited = time.perf_counter() - began
                self._traffic.waited_seconds += waited
                entry.forward.waited_seconds += waited
            if entry.copies is not None:
                self.loads.load(entry)
        with waiting():
            tensor = entry.tensor(geometry)
        self.reads.read_ahead(entry)
        if entry.copies is not None:
            self._load_ahead(entry)
        if entry.stored is not None and (is_first_use or not was_in_memory):
            self.pool.add_used(entry)
        return tensor

    def _load_ahead(self, entry: Entry) -> None:
        try:
            self.loads.load_ahead(entry)
        except CudaError as error:  # of another entry: raised when backward uses that entry
            self.writes.stop(error)

    # ---- transfers that have ended

    def _reap(self) -> None:
        """Finish the transfers that have ended."""
        if not self.files.closed:
            self.eviction.forget_gone()
            self.files.finish_orphans()
            self.writes.reap()
            if self.devices:
                self.devices.reap()
