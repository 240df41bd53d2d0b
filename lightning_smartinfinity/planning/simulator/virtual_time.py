"""Virtual time: processes that wait for each other and for work on shared resources, without threads or clocks.

Concurrent work shares each resource fairly, and rates change only when some work starts or ends. The simulation
computes these instants, so results are exact and reproducible.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import count

__all__ = ["Event", "Path", "Pool", "Process", "Resource", "Simulation"]

_FULL = 1e-12  # share of a resource; smaller remainders are rounding errors
_ENDED = 1e-12  # relative; work that ends within this tolerance ends together


class Event:
    """An event that happens once; processes may wait for it before or after it has happened."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: list[Callable[[], None]] = []
        self.happened = False

    def set(self) -> None:
        """Set the event, and resume the waiting processes."""
        assert not self.happened, "an event happens once"
        self.happened = True
        for resume in self._waiting:
            self._simulation.soon(resume)
        self._waiting.clear()

    def then(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` as soon as the event has happened."""
        if self.happened:
            self._simulation.soon(resume)
        else:
            self._waiting.append(resume)


Process = Generator[Event, None, None]
"""Generator that yields the events for which the process waits."""


@dataclass(frozen=True, eq=False)
class Resource:
    """A resource that does one second of work per second.

    Args:
        name: Name for reports.
        copies: Number of identical users that each simulated user represents. If ten devices do the same work at the
            same time, only one is simulated, and its use of shared resources counts ten times.
    """

    name: str
    copies: int = 1


@dataclass(eq=False)
class Path:
    """The resources that one kind of work uses at the same time.

    Args:
        uses: Resources, each with its seconds per unit of work (a byte, an element).
    """

    uses: tuple[tuple[Resource, float], ...]

    def __post_init__(self) -> None:
        assert all(seconds >= 0 for _, seconds in self.uses)
        self.uses = tuple(use for use in self.uses if use[1] > 0)
        self.rate = min((1 / seconds for _, seconds in self.uses), default=float("inf"))
        """Units per second if no other work is in progress."""
        self.done = 0.0
        """Units of all work started so far."""
        self.served = 0.0  # units done of a piece of work that has been in progress since the path became busy
        self.under_way: list[tuple[float, int, Event]] = []  # heap, by the value of `served` at which the work ends
        self.share = 0.0  # units per second of each piece of work


class Simulation:
    """Runs processes, starting at time 0."""

    def __init__(self) -> None:
        self.now = 0.0
        """Current virtual time, in seconds."""
        self._soon: deque[Callable[[], None]] = deque()
        self._busy: dict[Path, None] = {}  # in the order in which they became busy
        self._numbers = count()
        self._changed = False

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a call at the present instant, after calls that are already due."""
        self._soon.append(call)

    def event(self) -> Event:
        return Event(self)

    def start(self, process: Process) -> Event:
        """Start a process; return the event of its end."""
        end = Event(self)

        def resume() -> None:
            try:
                awaited = next(process)
            except StopIteration:
                end.set()
            else:
                awaited.then(resume)

        self.soon(resume)
        return end

    def work(self, path: Path, units: float) -> Event:
        """Start ``units`` of work on a path; return the event of its end."""
        end = Event(self)
        path.done += units
        if units <= 0 or not path.uses:
            end.set()
            return end
        heapq.heappush(path.under_way, (path.served + units, next(self._numbers), end))
        self._busy[path] = None
        self._changed = True
        return end

    def run(self) -> float:
        """Run until no work is in progress.

        Returns:
            The time at the end, in seconds.
        """
        while self._soon or self._busy:
            while self._soon:
                self._soon.popleft()()
            if self._busy:
                self._advance()
        return self.now

    def _advance(self) -> None:
        """Advance to the time at which the next piece of work ends."""
        if self._changed:
            _share(self._busy)
            self._changed = False
        seconds = min((path.under_way[0][0] - path.served) / path.share for path in self._busy)
        self.now += seconds
        for path in list(self._busy):
            path.served += path.share * seconds
            self._end(path)

    def _end(self, path: Path) -> None:
        under_way = path.under_way
        while under_way and under_way[0][0] <= path.served * (1 + _ENDED) + _ENDED:
            heapq.heappop(under_way)[2].set()
            self._changed = True
        if not under_way:
            path.served = 0.0
            del self._busy[path]


def _share(paths: Iterable[Path]) -> None:
    """Share resources max-min fairly: all work gets an equal share of its rate until one of its resources is full."""
    growing = list(paths)
    left: dict[Resource, float] = {}
    for path in growing:
        path.share = 0.0
        left.update((resource, 1.0) for resource, _ in path.uses)
    while growing:
        load = dict.fromkeys(left, 0.0)
        for path in growing:
            for resource, seconds in path.uses:
                load[resource] += resource.copies * len(path.under_way) * path.rate * seconds
        step = min(left[resource] / each for resource, each in load.items() if each > 0)
        for path in growing:
            path.share += step * path.rate
        for resource, each in load.items():
            left[resource] -= step * each
        full = {resource for resource, each in load.items() if each > 0 and left[resource] <= _FULL}
        growing = [path for path in growing if not any(resource in full for resource, _ in path.uses)]


class Pool:
    """Threads that run processes in the order in which they are pushed, like the native core's ``WorkerPool``."""

    def __init__(self, simulation: Simulation, num_threads: int) -> None:
        self._simulation = simulation
        self._idle = num_threads
        self._waiting: deque[tuple[Process, Event]] = deque()

    def push(self, process: Process) -> Event:
        """Queue a process; return the event of its end."""
        end = self._simulation.event()
        self._waiting.append((process, end))
        self._begin()
        return end

    def _begin(self) -> None:
        if self._idle and self._waiting:
            self._idle -= 1
            self._simulation.start(self._work(*self._waiting.popleft()))

    def _work(self, process: Process, end: Event) -> Process:
        yield from process
        self._idle += 1
        end.set()
        self._begin()
