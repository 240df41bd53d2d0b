"""Moves entries from where forward left them through a pool of host memory to storage, and back for backward."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.freed_memory import FreedMemory
from lightning_smartinfinity.activations.rates import Rates
from lightning_smartinfinity.activations.traffic import ActivationTraffic
from lightning_smartinfinity.config import ActivationOffload, TransferConfig
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.store import measure_activation_space, require_space
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.tensor_files import whole_blocks
from lightning_smartinfinity.store.tensor_store import TensorStore
from lightning_smartinfinity.transfer.tensors import lent_tensor

__all__ = ["ActivationStore"]

_LEAST_POOL_BYTES = 64 << 20
_SHARE_OF_POOL = 8  # one over the share of what a forward saves that the pool takes
_SHARE_OF_BUDGET = 2  # one over the share of the budget that the pool takes
_SHARE_READ_AHEAD = 2  # one over the share of the pool that is read ahead
_MOST_READ_AHEAD = 64  # entries


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
        stopped: Whether a write has failed, so that nothing more is offloaded.
        closed: Whether it is closed.
    """

    def __init__(self, settings: ActivationOffload, folders: Sequence[Path], *, transfer: TransferConfig) -> None:
        self._settings, self._folders, self._transfer = settings, folders, transfer
        self._process = os.getpid()
        self._pool = native.MemoryPool()
        self._files: TensorStore | None = None
        self._most_saved = 0  # bytes of the largest forward
        self._most_refused = 0  # bytes of the largest entry for which the pool was too small
        self._warned_of_budget = False
        self._original_bytes = 0  # of entries whose storages are kept alive
        self._forwards: list[Forward] = []  # with entries that may still leave
        self._leaving: deque[weakref.ref[Entry]] = deque()  # being written, oldest first
        # On storage and in the pool: what backward has still to use, oldest first, and what it has used.
        self._written: deque[weakref.ref[Entry]] = deque()
        self._used: deque[weakref.ref[Entry]] = deque()
        self._ahead: deque[weakref.ref[Entry]] = deque()  # read, or being read, before they are wanted
        # Entries may be dropped in any thread at any time: what that leaves to be done waits in these.
        self._freed: deque[int] = deque()  # bytes of entries that kept their storages alive
        self._orphans: deque[int] = deque()  # tickets of transfers that nobody wants
        self._freed_memory = FreedMemory()
        self._traffic = ActivationTraffic()
        self._failed_write: SmartInfinityError | None = None
        self._failed_read: SmartInfinityError | None = None
        self.lock = threading.RLock()
        self._rates = Rates()
        self.stopped = self.closed = False

    # ---- life

    def open(self) -> None:
        """Open the files; does nothing if they are open.

        Raises:
            ConfigError: The I/O engine is unavailable here.
            StorageFullError: Storage has less room than ``storage_bytes``.
            StorageError: A folder cannot be used, or the store is closed or belongs to the parent process.
        """
        self.require_usable()
        if self._files is None:
            most = self._settings.storage_bytes
            if isinstance(most, int):
                require_space(measure_activation_space(self._folders, nbytes=most))
            self._files = TensorStore(
                self._folders,
                job=self._transfer.job,
                direct_io=self._transfer.file_access,
                io_engine=self._transfer.io_engine,
                io_timeout=self._transfer.io_timeout,
                what="Activations",
                verifies=self._settings.verify,
            )
            weakref.finalize(self, _close_in, self._process, self._files)

    @property
    def files(self) -> TensorStore:
        """The open store of tensors."""
        assert self._files is not None, "a forward opens the files"
        return self._files

    def require_usable(self) -> None:
        """Check that entries can be used in this process.

        Raises:
            StorageError: The store is closed or belongs to the parent process.
        """
        if os.getpid() != self._process:
            raise StorageError(
                f"Activations that process {self._process} offloads were used in its forked child {os.getpid()}.",
                "Run forward and backward in the process that began them, or start the child without fork.",
            )
        if self.closed:
            raise StorageError(
                "Activations were removed from storage when their offloading was closed.",
                "Run backward before you close it.",
            )

    def close(self) -> None:
        """Wait for transfers in flight and close the files, which deletes them; idempotent.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        if os.getpid() != self._process:
            return
        if self._files is not None:
            for entry in () if self.closed else _living(self._leaving):
                if entry.writing is not None:
                    self._files.cancel(entry.writing)
            self.closed = True
            self._files.close()
        self.closed = True
        self._pool.limit = 0

    def give_back(self) -> None:
        """Give the memory of the pool back that nothing uses."""
        self._pool.limit = 0

    def entry_is_gone(self, entry: Entry) -> None:
        """Give up the transfers of an entry that nothing refers to any more. Any thread may call it at any time."""
        if os.getpid() != self._process or self.closed:
            return
        if entry.is_original and entry.forward is not None:
            self._freed.append(entry.nbytes)
        for ticket in (entry.writing, entry.reading):
            if ticket is not None:
                with suppress(ValueError):  # the files are closed
                    self._give_up(ticket)

    # ---- what is watched

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the pool takes."""
        return self._pool.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for backward: storages that entries keep alive, and memory of the pool in use."""
        self._count_freed()
        self._finish_orphans()
        return self._original_bytes + self._pool.lent_bytes

    @property
    def storage_bytes(self) -> int:
        """Bytes of all entries on storage."""
        return 0 if self._files is None or self.closed else self._files.storage_bytes

    @property
    def pool_bytes(self) -> int:
        """Most bytes of the pool that are in use, unless backward needs more at once."""
        return self._limit

    @property
    def read_ahead_bytes(self) -> int:
        """Most bytes that are read before they are wanted."""
        return self._limit // _SHARE_READ_AHEAD

    def traffic(self) -> ActivationTraffic:
        """Return the cumulative counters."""
        self._finish_orphans()
        counters = None if self._files is None else self._files.counters()
        return replace(
            self._traffic,
            written_bytes=0 if counters is None else counters.written_bytes,
            read_bytes=0 if counters is None else counters.read_bytes,
        )

    def update_rates(self) -> Rates:
        """Return what storage was seen to write and read in a second since the last call."""
        self._rates.update(self.files.counters())
        return self._rates

    def take_failure(self) -> SmartInfinityError | None:
        """Return why an entry could not be written or read, if so, and forget it."""
        failure = self._failed_read or self._failed_write
        self._failed_read = self._failed_write = None
        return failure

    def forget_failed_reads(self) -> None:
        """Forget why entries could not be read: the gradients that were computed without them are gone."""
        self._failed_read = None

    # ---- forward

    def begin(self, forward: Forward) -> None:
        """Take entries of a forward from now on."""
        self._forwards = [each for each in self._forwards if each.oldest() is not None]
        for each in (self._written, self._used, self._ahead):
            living = [found for found in each if found() is not None]
            each.clear()
            each.extend(living)
        self._forwards.append(forward)

    def admit(self, entry: Entry, forward: Forward) -> None:
        """Take a new entry, and let the oldest ones leave."""
        self._count_freed()
        forward.add(entry, time.perf_counter())
        self._traffic.saved_bytes += entry.nbytes
        self._most_saved = max(self._most_saved, forward.saved_bytes)
        self._original_bytes += entry.nbytes
        self._pool.limit = self._limit
        self._reap()
        self._measure()
        oldest = self._oldest_of(forward)
        while oldest is not None and oldest.end <= forward.limit and self._let_leave(oldest):
            oldest = self._oldest_of(forward)
        budget = self._settings.budget_bytes
        if budget is not None and not self.stopped:
            assert isinstance(budget, int)
            self._stay_below(budget, forward)
        self._measure()

    def count_shared(self) -> None:
        """Count a saved tensor that shares an entry."""
        self._traffic.deduplicated += 1

    def end(self, forward: Forward) -> None:
        """Count what stays in memory, as the forward has ended."""
        if forward.ended is None:
            forward.ended = time.perf_counter()
        self._freed_memory.give_back()
        self._reap()
        for entry in _living(forward.entries):
            if not entry.is_original:
                if entry.source.num_holders == 0 and entry.source.is_held_elsewhere:
                    forward.freed_nothing.add(entry.number)
                    self._traffic.freed_nothing_bytes += entry.nbytes
            elif forward.plan.frees_nothing(entry.number, entry.nbytes) and entry.is_held_elsewhere:
                forward.freed_nothing.add(entry.number)
                self._traffic.kept_elsewhere_bytes += entry.nbytes
            elif entry.end <= forward.limit and not forward.plan.frees_nothing(entry.number, entry.nbytes):
                self._traffic.kept_for_room_bytes += entry.nbytes
            else:
                self._traffic.kept_bytes += entry.nbytes

    def _oldest_of(self, forward: Forward) -> Entry | None:
        """Return the oldest entry that may still leave; one that the pool is too small for never does."""
        while (oldest := forward.oldest()) is not None and whole_blocks(oldest.nbytes) > self._limit:
            self._most_refused = max(self._most_refused, oldest.nbytes)
            forward.window.popleft()
        return oldest

    def _let_leave(self, entry: Entry) -> bool:
        """Copy an entry into the pool and start to write it; return whether there was room for it."""
        nbytes = whole_blocks(entry.nbytes)
        if self.stopped or not self._has_place(nbytes) or not self._make_room(nbytes):
            return False
        try:
            stored = self.files.add(entry.nbytes)
            memory = self._lent(entry)
        except StorageError as error:
            self._stop(entry, error)
            return False
        entry.copy_out(memory)
        # From here on others find the entry by its key and its bytes in the pool. Only then is it written, and only
        # then may its storage go, whose address a new one may take.
        ticket = self.files.write(stored, memory, io_class=native.IoClass.WRITE_BEHIND)
        entry.stored, entry.writing = stored, ticket
        entry.let_go()
        self._original_bytes -= entry.nbytes
        self._freed_memory.add(entry.nbytes)
        self._traffic.offloaded_bytes += entry.nbytes
        self._leaving.append(weakref.ref(entry))
        return True

    def _stay_below(self, budget: int, forward: Forward) -> None:
        """Wait for storage until no more bytes are held than the budget, as far as that is possible."""
        began = time.perf_counter()
        while self.held_bytes > budget and not self.stopped:
            oldest = next((each for each in map(self._oldest_of, self._forwards) if each is not None), None)
            if self._drop(self._used) or self._drop(self._written) or (oldest is not None and self._let_leave(oldest)):
                continue
            leaving = next((each for each in _living(self._leaving) if each.writing is not None), None)
            if leaving is None:
                self._warn_of_budget(budget, oldest)
                break
            self._end_write(leaving)
        waited = time.perf_counter() - began
        forward.held_up_seconds += waited
        self._traffic.held_up_seconds += waited

    def _warn_of_budget(self, budget: int, oldest: Entry | None) -> None:
        """Say once why more is held than the budget, if that is because of a setting."""
        if oldest is not None and not self._has_place(whole_blocks(oldest.nbytes)):
            why, remedy = f"storage_bytes={self._settings.storage_bytes} leaves no room", "Raise storage_bytes."
        elif self._most_refused:
            is_set = self._settings.host_bytes != "auto"
            why = f"a tensor of {self._most_refused} bytes does not fit into the pool of {self._limit} bytes"
            remedy = "Raise host_bytes." if is_set else "Raise budget_bytes, of which the pool takes half."
        else:
            return
        if not self._warned_of_budget:
            self._warned_of_budget = True
            warnings.warn(
                f"ActivationOffload(budget_bytes={budget}) is not kept: {self.held_bytes} bytes are held for backward, "
                f"because {why}. {remedy}",
                stacklevel=2,
            )

    def _has_place(self, nbytes: int) -> bool:
        most = self._settings.storage_bytes
        assert not isinstance(most, str), "a size given as text is kept as bytes"
        return most is None or self.files.storage_bytes + nbytes <= most

    # ---- backward

    def fetch(self, entry: Entry) -> None:
        """Have an entry in memory, and read those ahead that backward is expected to want next.

        Raises:
            StorageError: It cannot be read.
        """
        began = time.perf_counter()
        is_first_use = not entry.was_used
        if is_first_use:
            entry.forward.use(entry, began)
            self._freed_memory.add(entry.nbytes)  # backward frees about as much as it uses
        self._reap()
        self._measure()
        was_in_memory = entry.memory is not None
        if not entry.is_original:
            self._have_in_memory(entry)
            waited = time.perf_counter() - began
            self._traffic.waited_seconds += waited
            entry.forward.waited_seconds += waited
        self._read_ahead(entry)
        if entry.stored is not None and (is_first_use or not was_in_memory):
            self._used.append(weakref.ref(entry))
        self._measure()

    def _have_in_memory(self, entry: Entry) -> None:
        if entry.writing is not None:
            # Its bytes are in the pool. Nobody will read them from storage.
            ticket, entry.writing, entry.stored = entry.writing, None, None
            self._give_up(ticket)
            self._traffic.forwarded_bytes += entry.nbytes
        elif entry.memory is None:
            nbytes = whole_blocks(entry.nbytes)
            while nbytes > self._room_to_read and (self._drop(self._used) or self._drop(self._written)):
                pass
            self._start_read(entry, native.IoClass.AWAITED)
        if entry.reading is not None:
            self._measure(is_waiting=True)
            try:
                self.files.finish(entry.reading)
            except StorageError as error:
                entry.reading = entry.memory = None
                raise _about(entry, error) from error
            finally:
                self._measure(is_waiting=True)
            entry.reading = None  # not after an interrupt

    def _start_read(self, entry: Entry, io_class: native.IoClass) -> None:
        assert entry.stored is not None
        memory = self._lent(entry)
        entry.memory, entry.reading = memory, self.files.read(entry.stored, memory, io_class=io_class)

    def _read_ahead(self, entry: Entry) -> None:
        forward: Forward = entry.forward
        forward.expect_after(entry)
        while (following := forward.following()) is not None:
            if following.memory is None and not following.is_original and following.stored is not None:
                nbytes = whole_blocks(following.nbytes)
                if not self._may_read_ahead(nbytes):
                    return
                self._start_read(following, native.IoClass.GATHER)
                self._ahead.append(weakref.ref(following))
            forward.skip()

    def _may_read_ahead(self, nbytes: int) -> bool:
        """Return whether so many bytes more may be read before they are wanted. Nothing has to go for them."""
        if nbytes > self._room_to_read:
            return False
        unused = [found for found in self._ahead if (entry := found()) is not None and not entry.was_used]
        self._ahead = deque(unused)
        ahead = sum(whole_blocks(entry.nbytes) for entry in _living(unused))
        return not unused or (len(unused) < _MOST_READ_AHEAD and ahead + nbytes <= self.read_ahead_bytes)

    @property
    def _room_to_read(self) -> int:
        """Bytes that may be read back now, within the pool and the budget."""
        room, budget = self._limit - self._pool.lent_bytes, self._settings.budget_bytes
        return min(room, budget - self.held_bytes) if isinstance(budget, int) else room

    def note_unreadable(self, error: SmartInfinityError) -> None:
        """Note why an entry could not be read, for :meth:`take_failure`."""
        self._failed_read = self._failed_read or error

    # ---- the pool

    @property
    def _limit(self) -> int:
        """Most bytes of the pool that are in use, unless backward needs more at once."""
        host_bytes, budget = self._settings.host_bytes, self._settings.budget_bytes
        if isinstance(host_bytes, int):
            return host_bytes
        automatic = max(_LEAST_POOL_BYTES, self._most_saved // _SHARE_OF_POOL)
        return min(automatic, budget // _SHARE_OF_BUDGET) if isinstance(budget, int) else automatic

    def _make_room(self, nbytes: int) -> bool:
        """Drop memory of entries that are on storage until so many bytes more fit into the pool, if that is possible.

        Args:
            nbytes: Bytes, in whole blocks.

        Returns:
            Whether they fit.
        """
        while self._pool.lent_bytes + nbytes > self._limit:
            if not self._drop(self._used) and not self._drop(self._written):
                return False
        return True

    def _drop(self, entries: deque[weakref.ref[Entry]]) -> bool:
        """Drop the memory of the first of these entries that can be read again; return whether there was one."""
        while entries:
            entry = entries.popleft()()
            if entry is None or entry.memory is None or entry.stored is None:
                continue
            if entry.writing is None and entry.reading is None:
                entry.memory = None
                return True
        return False

    def _lent(self, entry: Entry) -> torch.Tensor:
        with storage_errors("Taking host memory for activations in", self.files.path):
            return lent_tensor(self._pool, whole_blocks(entry.nbytes))

    # ---- ends of transfers

    def _reap(self) -> None:
        """Finish the writes that have ended, and forget what is gone."""
        if self.closed:
            return
        self._finish_orphans()
        while self._leaving:
            entry = self._leaving[0]()
            if entry is not None and entry.writing is not None:
                if not self.files.done(entry.writing):
                    return
                self._end_write(entry)
            self._leaving.popleft()

    def _end_write(self, entry: Entry) -> None:
        """Wait for the write of an entry, whose memory can go afterwards, or stays if the write has failed."""
        assert entry.writing is not None
        try:
            self.files.finish(entry.writing)
        except StorageError as error:
            entry.writing = entry.stored = None
            self._stop(entry, error)
            return
        entry.writing = None  # not after an interrupt
        self._written.append(weakref.ref(entry))

    def _stop(self, entry: Entry, error: StorageError) -> None:
        """Offload nothing more, as an entry could not be written. It stays in memory."""
        self.stopped = True
        failure = _about(entry, error)
        self._failed_write = self._failed_write or failure
        warnings.warn(f"{failure} What forward saves stays in memory from now on.", stacklevel=2)

    def _give_up(self, ticket: int) -> None:
        """Cancel a transfer, whose memory is free once it has ended."""
        self.files.cancel(ticket)
        self._orphans.append(ticket)
        self._finish_orphans()

    def _finish_orphans(self) -> None:
        for _ in range(0 if self.closed else len(self._orphans)):
            try:
                ticket = self._orphans.popleft()
            except IndexError:  # another thread has taken it
                return
            if self.files.done(ticket):
                with suppress(StorageError):  # nobody wants what could not be transferred
                    self.files.finish(ticket)
            else:
                self._orphans.append(ticket)

    def _count_freed(self) -> None:
        while self._freed:
            self._original_bytes -= self._freed.popleft()

    def _measure(self, *, is_waiting: bool = False) -> None:
        """Look at the counters, and at whether storage is at work.

        It is called before requests are added and afterwards, so that it sees what is left of earlier ones.

        Args:
            is_waiting: Whether backward waits for a read.
        """
        last = self._ahead[-1]() if self._ahead else None
        is_reading = last is not None and last.reading is not None and not self.files.done(last.reading)
        self._rates.note(self.files.counters(), writing=bool(self._leaving), reading=is_waiting or is_reading)


def _living(found: Iterable[weakref.ref[Entry]]) -> Iterator[Entry]:
    return (entry for each in found if (entry := each()) is not None)


def _about(entry: Entry, error: StorageError) -> StorageError:
    return type(error)(f"{entry}: {error.problem}", error.remedy)


def _close_in(process: int, files: TensorStore) -> None:
    # A forked child runs exit handlers, too; the files are its parent's.
    if os.getpid() == process:
        files.close()
