"""Records of forwards: their entries, which of these may be evicted, and the order in which backward uses them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from lightning_smartinfinity.activations.cuda.clock import DeviceClock
from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.activations.traffic import ActivationTraffic

__all__ = ["Forward", "Plan"]

_LEAST_SECONDS = 1e-9
_TENTH = 10  # one over the share by which the bytes of two forwards may differ


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a forward, made from an earlier forward and its backward.

    Args:
        sizes: Bytes of the earlier forward's entries, in the order in which they were packed.
        offloaded_bytes: Bytes of the oldest entries that are offloaded at once.
        kept_bytes: Bytes of the newest entries that are kept in memory.
        chosen_for: Bytes that the measured forward saved, from which these two were chosen; 0 if they were not chosen.
        order: Numbers of the entries in the order in which backward used them.
        freed_nothing: Numbers of the entries that something else held until forward ended.
    """

    sizes: tuple[int, ...] = ()
    offloaded_bytes: int = 0
    kept_bytes: int = 0
    chosen_for: int = 0
    order: tuple[int, ...] = ()
    freed_nothing: frozenset[int] = frozenset()

    @property
    def is_chosen(self) -> bool:
        """Whether a measurement determined how much is offloaded."""
        return self.chosen_for > 0

    def fits(self, total: int) -> bool:
        """Return whether a forward that saved ``total`` bytes is about as large as the measured one."""
        return _TENTH * abs(total - self.chosen_for) <= self.chosen_for

    def frees_nothing(self, number: int, nbytes: int) -> bool:
        """Return whether evicting an entry would free no memory, as in the forward before."""
        return number in self.freed_nothing and self.sizes[number] == nbytes


@dataclass(eq=False, kw_only=True)
class Forward:
    """Record of one forward.

    Args:
        plan: Plan of the forward.
        kind: Everything known that determines the sizes of saved tensors; None if nothing is known.
        began: When the forward began, in seconds of a monotonic clock.
        clock: Clock of the device, if times are measured there. The times below are the host's until
            :meth:`take_times`.

    Attributes:
        window: Entries that may still be evicted, oldest first.
        entries: All entries.
        sizes: Bytes of each entry.
        times: When each entry was packed, in seconds since the forward began, without waits for storage.
        saved_bytes: Bytes of all entries.
        ended: When the forward ended, or when a backward within it first used an entry.
        order: Numbers of the entries in the order in which backward first used them.
        first_use: When backward first used an entry.
        last_use: When backward last used an entry for the first time.
        waited_seconds: Time for which backward waited for storage.
        held_up_seconds: Time for which this forward waited for storage.
        hook_seconds: Time of the hooks of forward and backward, if it was measured.
        freed_nothing: Numbers of the entries that something else held until the forward ended.
    """

    plan: Plan
    began: float
    kind: Hashable = None
    clock: DeviceClock | None = None
    window: deque[weakref.ref[Entry]] = field(default_factory=deque)
    entries: list[weakref.ref[Entry]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    ended: float | None = None
    order: list[int] = field(default_factory=list)
    first_use: float = 0.0
    last_use: float = 0.0
    waited_seconds: float = 0.0
    held_up_seconds: float = 0.0
    hook_seconds: float = 0.0
    freed_nothing: set[int] = field(default_factory=set)
    _expected: tuple[int, ...] | None = None  # numbers in the order in which backward is expected to use the entries
    _places: dict[int, int] = field(default_factory=dict)  # positions in that order, by number
    _next: int = 0  # first position in that order from which nothing was read ahead

    def add(self, entry: Entry, now: float) -> None:
        """Add a new entry. It may be evicted, unless that would free no memory."""
        entry.number = len(self.sizes)
        self.saved_bytes += entry.nbytes
        entry.end = self.saved_bytes
        self.sizes.append(entry.nbytes)
        self.times.append(now - self.began - self.held_up_seconds)
        if self.clock is not None:
            self.clock.pack()
        self.entries.append(weakref.ref(entry))
        if not self.plan.frees_nothing(entry.number, entry.nbytes):
            self.window.append(weakref.ref(entry))

    @property
    def limit(self) -> int:
        """Bytes of the oldest entries to evict. A forward that saves more than the one before keeps no more."""
        return max(self.plan.offloaded_bytes, self.saved_bytes - self.plan.kept_bytes)

    @property
    def elsewhere_bytes(self) -> int:
        """Bytes of the entries so far that something else held, in the forward before, until its end."""
        return sum(self.sizes[number] for number in self.plan.freed_nothing if number < len(self.sizes))

    @property
    def forward_seconds(self) -> float:
        """Time of forward, without waits for storage; above zero."""
        assert self.ended is not None
        return max(self.ended - self.began - self.held_up_seconds, _LEAST_SECONDS)

    @property
    def backward_seconds(self) -> float:
        """Time of backward, without waits for storage."""
        return max(self.last_use - self.first_use - self.waited_seconds, 0.0)

    @property
    def busy_seconds(self) -> float:
        """Time of forward and backward, without waits for storage."""
        return self.forward_seconds + self.backward_seconds

    @property
    def seconds(self) -> float:
        """Time of forward and backward, with waits for storage."""
        return self.busy_seconds + self.held_up_seconds + self.waited_seconds

    @property
    def seconds_without_hooks(self) -> float:
        """Time of forward and backward without the time of hooks; above zero, although hooks also run outside it."""
        return max(self.seconds - self.hook_seconds, _LEAST_SECONDS)

    def oldest(self) -> Entry | None:
        """Return the oldest entry that may still be evicted."""
        while self.window:
            entry = self.window[0]()
            if entry is not None and entry.is_original and not entry.was_used:
                return entry
            self.window.popleft()
        return None

    def count_kept(self, traffic: ActivationTraffic) -> None:
        """Count the entries that are in memory when forward ends, and note those that something else holds."""
        entries = [entry for found in self.entries if (entry := found()) is not None]
        held = {entry.source for entry in entries if entry.is_original}
        for entry in entries:
            frees_nothing = self.plan.frees_nothing(entry.number, entry.nbytes)
            if not entry.is_original:
                if entry.source not in held and entry.source.is_held_elsewhere:
                    self.freed_nothing.add(entry.number)
                    traffic.freed_nothing_bytes += entry.nbytes
            elif frees_nothing and entry.is_held_elsewhere:
                self.freed_nothing.add(entry.number)
                traffic.kept_elsewhere_bytes += entry.nbytes
            elif entry.end <= self.limit and not frees_nothing:
                traffic.kept_for_room_bytes += entry.nbytes
            else:
                traffic.kept_bytes += entry.nbytes

    def use(self, entry: Entry, now: float) -> None:
        """Record that backward uses an entry for the first time."""
        entry.was_used = True
        if not self.order:
            self.first_use = now
            self.ended = now if self.ended is None else self.ended
        self.last_use = now
        self.order.append(entry.number)
        clock = self.clock  # another thread may set it to None
        if clock is not None:
            clock.use()

    def take_times(self) -> None:
        """If there is a clock, wait for the device and replace the host's times by the device's."""
        if self.clock is None or self.ended is None:
            return
        clock, self.clock = self.clock, None
        clock.wait()
        self.times = clock.times
        self.ended = self.began + clock.forward_seconds + self.held_up_seconds
        self.last_use = self.first_use + clock.backward_seconds + self.waited_seconds

    def expect_after(self, entry: Entry) -> None:
        """Continue reading ahead after an entry, unless it already continues further on."""
        if self._expected is None:
            known = self.plan.order if self.plan.sizes == tuple(self.sizes) else ()
            self._expected = known or tuple(reversed(range(len(self.sizes))))
            self._places = {number: place for place, number in enumerate(self._expected)}
        self._next = max(self._next, self._places.get(entry.number, -1) + 1)

    def expected_after(self, entry: Entry) -> Iterator[Entry]:
        """Yield the unused entries that backward is expected to use after an entry."""
        assert self._expected is not None
        for place in range(self._places.get(entry.number, len(self._expected)) + 1, len(self._expected)):
            following = self.entries[self._expected[place]]()
            if following is not None and not following.was_used:
                yield following

    def following(self) -> Entry | None:
        """Return the unused entry that backward is expected to use next, from the read-ahead position on."""
        assert self._expected is not None
        while self._next < len(self._expected):
            entry = self.entries[self._expected[self._next]]()
            if entry is not None and not entry.was_used:
                return entry
            self._next += 1
        return None

    def skip(self) -> None:
        """Advance :meth:`following` to the next entry."""
        self._next += 1
