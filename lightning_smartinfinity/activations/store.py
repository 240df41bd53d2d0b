"""Lets entries leave for storage in forward, and has them in memory when backward wants them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch

from lightning_smartinfinity.activations.cuda.clock import DeviceClock
from lightning_smartinfinity.activations.cuda.copies import DeviceCopies
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
from lightning_smartinfinity.errors import CudaError, SmartInfinityError
from lightning_smartinfinity.settings import ActivationOffload, TransferConfig
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore

__all__ = ["ActivationStore"]


class ActivationStore:
    """One process's entries on storage, and the pool of host memory through which they move.

    It refers to no entry: an entry's memory and place are free when the graph drops it. The pool keeps the newest
    entries and writes the oldest. What is written stays in the pool until its room is needed.

    Whoever calls it holds :attr:`lock`, except for :meth:`entry_is_gone`.

    Args:
        settings: How much is offloaded.
        folders: Storage folders.
        transfer: Where in the folders, and how, files are opened and used.

    Attributes:
        lock: Lock for entries and for everything here.
    """

    def __init__(self, settings: ActivationOffload, folders: Sequence[Path], *, transfer: TransferConfig) -> None:
        self._settings = settings
        self._files = ActivationFiles(settings, folders, transfer=transfer)
        self._pool = Pool(settings, self._files)
        self._rates = Rates()
        self._writes = Writes(settings, self._files, self._pool)
        self._reads = Reads(self._files, self._pool, spare_bytes=self._spare_bytes)
        self._loads = Loads(self._pool, self._reads)
        self._devices = Devices(self._rates, stop=self._writes.stop)
        self._freed_memory = FreedMemory(LEAST_FREED)
        self._traffic = ActivationTraffic()
        self._eviction = Eviction(
            settings, self._pool, self._writes, traffic=self._traffic, freed_memory=self._freed_memory
        )
        self.lock = threading.RLock()

    # ---- life

    def open(self) -> None:
        """Open the files; does nothing if they are open.

        Raises:
            ConfigError: The I/O engine is unavailable here.
            StorageFullError: Storage has less room than ``storage_bytes``.
            StorageError: A folder cannot be used, or the store is closed or belongs to the parent process.
        """
        self._files.open()

    @property
    def files(self) -> TensorStore:
        """The open store of tensors."""
        return self._files.tensors

    def require_usable(self) -> None:
        """Check that entries can be used in this process.

        Raises:
            StorageError: The store is closed or belongs to the parent process.
        """
        self._files.require_usable()

    def close(self) -> None:
        """Wait for transfers in flight and close the files, which deletes them; idempotent.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        if not self._files.is_of_parent:
            self._devices.close()
            self._files.close(self._writes.entries())
            self._pool.give_back()

    def give_back(self) -> None:
        """Give the memory of the pool back that nothing uses."""
        self._pool.give_back()

    def entry_is_gone(self, entry: Entry) -> None:
        """Give up the transfers of an entry that nothing refers to any more. Any thread may call it at any time."""
        if self._files.is_of_parent or self._files.closed:
            return
        entry.unload()
        for ticket in (entry.writing, entry.reading):
            if ticket is not None:
                with suppress(ValueError):  # the files are closed
                    self._files.give_up(ticket)

    # ---- what is watched

    @property
    def stopped(self) -> bool:
        """Whether a write or a copy has failed, so that nothing more is offloaded."""
        return self._writes.stopped

    @property
    def is_on_processor(self) -> bool:
        """Whether no entry lies on a device."""
        return not self._devices

    @property
    def devices(self) -> list[torch.device]:
        """Devices on which entries were."""
        return self._devices.names()

    def start_clock(self) -> DeviceClock | None:
        """Return a clock of the device on which entries were, or of the first one; None if all were in host memory."""
        return next(map(DeviceClock, self._devices.names()), None)

    def wait_for_devices(self) -> None:
        """Wait until all devices have done what torch's current streams were given. What failed is told later."""
        self._devices.wait()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the pool takes."""
        return self._pool.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for backward.

        These are storages that entries keep alive, memory of the pool in use, and entries that were copied back onto
        devices.
        """
        self._files.finish_orphans()
        self._devices.reap()
        return self._eviction.nbytes + self._pool.lent_bytes + self._loads.nbytes

    def _spare_bytes(self) -> int | None:
        budget = self._settings.budget_bytes
        return budget - self.held_bytes if isinstance(budget, int) else None

    @property
    def storage_bytes(self) -> int:
        """Bytes of all entries on storage."""
        return self.files.storage_bytes if self._files.was_opened and not self._files.closed else 0

    @property
    def pool_bytes(self) -> int:
        """Most bytes of the pool that are in use, unless backward needs more at once."""
        return self._pool.limit

    @property
    def read_ahead_bytes(self) -> int:
        """Most bytes that are read before they are wanted."""
        return self._reads.ahead_bytes

    @property
    def most_evicted_bytes(self) -> int:
        """Most bytes of entries that had left at once."""
        return self._eviction.most_evicted

    @property
    def load_ahead_bytes(self) -> int:
        """Most bytes that are copied to devices before they are wanted."""
        return self._loads.limit

    def traffic(self) -> ActivationTraffic:
        """Return the cumulative counters."""
        self._files.finish_orphans()
        if not self._files.was_opened:
            return replace(self._traffic)
        counters = self.files.counters()
        return replace(self._traffic, written_bytes=counters.written_bytes, read_bytes=counters.read_bytes)

    def update_rates(self) -> Rates:
        """Return what storage and copies were seen to move in a second since the last call."""
        self._rates.update(self.files.counters())
        return self._rates

    def note_unreadable(self, error: SmartInfinityError) -> None:
        """Note why an entry could not be read, for :meth:`take_failure`."""
        self._files.note_unreadable(error)

    def take_failure(self) -> SmartInfinityError | None:
        """Return why an entry could not be written or read, if so, and forget it."""
        return self._files.take_failure()

    def forget_failed_reads(self) -> None:
        """Forget why entries could not be read: the gradients that were computed without them are gone."""
        self._files.forget_failed_reads()

    # ---- forward

    def copies_of(self, device: torch.device) -> DeviceCopies | None:
        """Return what copies entries of a device; None if they cannot leave it."""
        return self._devices.copies_of(device)

    def begin(self, forward: Forward) -> None:
        """Take entries of a forward from now on."""
        self._pool.forget_gone()
        self._writes.forget_gone()
        self._reads.forget_gone()
        self._eviction.begin(forward)

    def admit(self, entry: Entry, tensor: torch.Tensor, forward: Forward) -> None:
        """Take a new entry, which was made for a tensor, and let the oldest ones leave."""
        self._eviction.add(entry, tensor, forward)
        self._reap()
        self._eviction.evict_oldest(forward, held_bytes=lambda: self.held_bytes)

    def share(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Take a saved tensor that shares an entry."""
        self._writes.note_packed(entry, tensor)
        self._traffic.deduplicated += 1

    def end(self, forward: Forward) -> None:
        """Count what stays in memory, as the forward has ended."""
        if forward.ended is None:
            forward.ended = time.perf_counter()
            if forward.clock is not None:
                forward.clock.end()
        self._reap()
        forward.count_kept(self._traffic)
        if forward.sizes and not self._files.closed:
            self._files.tensors.keep_length()  # the next forward needs about as much

    # ---- backward

    def fetch(self, entry: Entry, geometry: Geometry) -> torch.Tensor:
        """Return a tensor of an entry, and read those ahead that backward is expected to want next.

        Raises:
            CudaError: It cannot be copied onto its device. Nothing is offloaded any more.
            StorageError: It cannot be read.
        """
        try:
            return self._fetch(entry, geometry)
        except CudaError as error:
            failure = entry.failure(error)
            self._writes.stop(failure)
            raise failure from error

    def _fetch(self, entry: Entry, geometry: Geometry) -> torch.Tensor:
        is_first_use = not entry.was_used
        if is_first_use:
            entry.forward.use(entry, time.perf_counter())
            if entry.copies is None and entry.stored is not None:
                # Backward frees about as much as it uses. Without offloading, that is as it is in autograd alone.
                self._freed_memory.add(entry.nbytes)
        self._reap()
        was_in_memory = entry.memory is not None
        clock: DeviceClock | None = entry.forward.clock
        waiting = nullcontext if clock is None or not is_first_use else clock.waiting
        if not entry.is_original:
            if entry.is_being_written:
                self._writes.give_up(entry)
                self._traffic.forwarded_bytes += entry.nbytes
            if entry.loaded is None:
                began = time.perf_counter()
                with waiting():
                    self._reads.have_in_memory(entry)
                waited = time.perf_counter() - began
                self._traffic.waited_seconds += waited
                entry.forward.waited_seconds += waited
            if entry.copies is not None:
                self._loads.load(entry)
        with waiting():
            tensor = entry.tensor(geometry)
        self._reads.read_ahead(entry)
        if entry.copies is not None:
            self._load_ahead(entry)
        if entry.stored is not None and (is_first_use or not was_in_memory):
            self._pool.add_used(entry)
        return tensor

    def _load_ahead(self, entry: Entry) -> None:
        try:
            self._loads.load_ahead(entry)
        except CudaError as error:  # of another entry; whoever wants that is told
            self._writes.stop(error)

    # ---- ends of transfers

    def _reap(self) -> None:
        """Finish what has ended."""
        if not self._files.closed:
            self._files.finish_orphans()
            self._writes.reap()
            if self._devices:
                self._devices.reap()
