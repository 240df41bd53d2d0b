"""Decides which entries forward evicts from memory, and when."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import torch

from lightning_smartinfinity.activations.entries import Entry, Tickets
from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.pool import Pool
from lightning_smartinfinity.activations.traffic import ActivationTraffic
from lightning_smartinfinity.activations.writes import Writes
from lightning_smartinfinity.common.freed_memory import FreedMemory
from lightning_smartinfinity.settings import ActivationOffload
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks

__all__ = ["LEAST_FREED", "Eviction"]

LEAST_FREED = 256 << 20
"""Least bytes of host memory to return to the system together: returning less is not worth the time."""

_SHARE_SPARE = 8  # one over the share of the pool that cached entries leave free
_SHARE_FREED = 2  # one over the share of a forward's saved bytes that is returned to the system together


class Eviction:
    """Evicts the oldest of the entries whose storages are in memory.

    Args:
        settings: How much is offloaded.
        pool: Pool into which entries are evicted.
        writes: Copies entries into the pool and writes them.
        traffic: Counters of the entries.
        freed_memory: Gets the number of host bytes that each eviction frees.

    Attributes:
        most_evicted: Most bytes of entries that were evicted at once.
    """

    def __init__(
        self,
        settings: ActivationOffload,
        pool: Pool,
        writes: Writes,
        *,
        traffic: ActivationTraffic,
        freed_memory: FreedMemory,
    ) -> None:
        self._settings, self._pool, self._writes = settings, pool, writes
        self._traffic, self._freed_memory = traffic, freed_memory
        self._forwards: list[Forward] = []  # with entries that may still be evicted
        self._nbytes = 0
        self._most_refused = 0  # bytes of the largest entry for which the pool was too small
        self._warned_of_budget = False
        self._evicted = 0
        # Bytes by which each entry is counted in _nbytes and _evicted, and its transfers. Any thread may drop entries
        # at any time. The callback then is deque.append, which is not written in Python: no interrupt can come within
        # it, and Python would ignore one.
        self._counted: dict[weakref.ref[Entry], tuple[int, int, Tickets]] = {}
        self._gone: deque[weakref.ref[Entry]] = deque()
        self.most_evicted = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that entries keep alive."""
        self.forget_gone()
        return self._nbytes

    def begin(self, forward: Forward) -> None:
        """Begin a forward, whose entries are added next."""
        self._forwards = [each for each in self._forwards if each.oldest() is not None]
        self._forwards.append(forward)

    def add(self, entry: Entry, tensor: torch.Tensor, forward: Forward) -> None:
        """Add a new entry that was made for a tensor."""
        self._writes.note_packed(entry, tensor)
        self._traffic.saved_bytes += entry.nbytes
        found = weakref.ref(entry, self._gone.append)
        # Python handles signals at calls and backward jumps: not between the next two lines.
        self._nbytes += entry.nbytes
        self._counted[found] = entry.nbytes, 0, entry.tickets
        entry.forward = forward
        forward.add(entry, time.perf_counter())
        self._pool.most_saved = max(self._pool.most_saved, forward.saved_bytes)
        self._pool.largest = max(self._pool.largest, entry.nbytes)
        self._freed_memory.batch_bytes = max(LEAST_FREED, self._pool.most_saved // _SHARE_FREED)
        self._pool.apply_limit()

    def forget_gone(self) -> None:
        """Stop counting deleted entries, and give up their transfers."""
        while self._gone:
            found = self._gone[0]
            if found in self._counted:
                held, evicted, tickets = self._counted[found]
                self._writes.give_up_all(tickets)
                # No interrupt comes between the next three lines.
                self._nbytes -= held
                self._evicted -= evicted
                del self._counted[found]
            self._gone.popleft()

    def evict_oldest(self, forward: Forward, *, held_bytes: Callable[[], int]) -> None:
        """Evict the oldest entries of a forward, and entries of other forwards if more is held than the budget.

        Args:
            forward: The forward.
            held_bytes: Returns the bytes that are held for backward.
        """
        cached = self._writes.oldest_cached()
        while cached is not None and not self._stays_cached(cached) and self._writes.write_cached(cached):
            cached = self._writes.oldest_cached()
        oldest = self._next_of(forward)
        while oldest is not None and oldest.end <= forward.limit and self._evict(oldest):
            oldest = self._next_of(forward)
        budget = self._settings.budget_bytes
        if budget is not None and not self._writes.stopped:
            assert isinstance(budget, int)
            with nullcontext() if forward.clock is None else forward.clock.held_up():
                self._stay_below(budget, forward, held_bytes)

    def _next_of(self, forward: Forward) -> Entry | None:
        """Return the oldest entry that may be evicted, and skip those that are too large for the pool."""
        while (oldest := forward.oldest()) is not None and whole_blocks(oldest.nbytes) > self._pool.limit:
            self._most_refused = max(self._most_refused, oldest.nbytes)
            forward.window.popleft()
        return oldest

    def _stays_cached(self, entry: Entry) -> bool:
        """Return whether the pool has room for an entry from a device until backward uses it.

        Then the entry need not be written. With a budget it is written, because the pool counts towards the budget.
        """
        forward: Forward = entry.forward
        if entry.copies is None or self._settings.budget_bytes is not None or not forward.plan.is_chosen:
            return False
        return entry.end > forward.limit - self._pool.limit + self._pool.limit // _SHARE_SPARE

    def _evict(self, entry: Entry) -> bool:
        """Evict an entry if there is room for it; return whether there is."""
        self.forget_gone()
        found = weakref.ref(entry)
        if not self._writes.begin(entry, stays_cached=self._stays_cached(entry)):
            return False
        # No interrupt comes between the next three lines.
        self._nbytes -= entry.nbytes
        self._evicted += entry.nbytes
        self._counted[found] = 0, entry.nbytes, entry.tickets
        self.most_evicted = max(self.most_evicted, self._evicted)
        if entry.copies is None:
            self._freed_memory.add(entry.nbytes)
        self._traffic.offloaded_bytes += entry.nbytes
        return True

    def _stay_below(self, budget: int, forward: Forward, held_bytes: Callable[[], int]) -> None:
        """Wait for storage until at most ``budget`` bytes are held, if that is possible."""
        began = time.perf_counter()
        while held_bytes() > budget and not self._writes.stopped:
            oldest = next((each for each in map(self._next_of, self._forwards) if each is not None), None)
            if self._pool.drop() or (oldest is not None and self._evict(oldest)):
                continue
            if not self._writes.finish_first():
                self._warn_of_budget(budget, oldest, held_bytes(), elsewhere=forward.elsewhere_bytes)
                break
        waited = time.perf_counter() - began
        forward.held_up_seconds += waited
        self._traffic.held_up_seconds += waited

    def _warn_of_budget(self, budget: int, oldest: Entry | None, held: int, *, elsewhere: int) -> None:
        """Warn once if more is held than the budget because of a setting, or because something else holds tensors."""
        if oldest is not None and not self._writes.has_place(whole_blocks(oldest.nbytes)):
            why, remedy = f"storage_bytes={self._settings.storage_bytes} leaves no room", "Raise storage_bytes."
        elif self._most_refused:
            is_set = self._settings.host_bytes != "auto"
            why = f"a tensor of {self._most_refused} bytes does not fit into the pool of {self._pool.limit} bytes"
            remedy = "Raise host_bytes." if is_set else "Raise budget_bytes, of which the pool takes half."
        elif elsewhere:
            why = f"something else holds tensors of {elsewhere} bytes, which offloading would not free"
            remedy = "Keep no tensors that forward computes, or raise budget_bytes."
        else:
            return
        if not self._warned_of_budget:
            self._warned_of_budget = True
            warnings.warn(
                f"ActivationOffload(budget_bytes={budget}) is not kept: {held} bytes are held for backward, "
                f"because {why}. {remedy}",
                stacklevel=2,
            )
