"""Virtual time: processes that wait for each other and for work on resources that they share. No thread, no clock.

Work is fluid. What is under way at the same time shares each resource fairly, and rates change only where something
begins or ends: these instants are computed, so that results are exact and the same in every run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import count

__all__ = ["Event", "Path", "Pool", "Process", "Resource", "Simulation"]

_FULL = 1e-12  # of a second's work per second: less is rounding
_ENDED = 1e-12  # relative: what ends within it ends together


class Event:
    """Happens once; processes may wait for it before and after."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: list[Callable[[], None]] = []
        self.happened = False

    def set(self) -> None:
        """It happens now."""
        assert not self.happened, "an event happens once"
        self.happened = True
        for resume in self._waiting:
            self._simulation.soon(resume)
        self._waiting.clear()

    def then(self, resume: Callable[[], None]) -> None:
        """Call this as soon as it has happened."""
        if self.happened:
            self._simulation.soon(resume)
        else:
            self._waiting.append(resume)


Process = Generator[Event, None, None]
"""Yields what it waits for."""


@dataclass(frozen=True, eq=False)
class Resource:
    """What does a second of work per second.

    Args:
        name: For reports.
        copies: How many identical users each one that is simulated stands for: of ten devices that do the same at the
            same time, one is simulated, and what they share counts its use ten times.
    """

    name: str
    copies: int = 1


@dataclass(eq=False)
class Path:
    """What work of one kind needs, all at a time.

    Args:
        uses: Resources with the seconds of each that a unit of work takes (a byte, an element).
    """

    uses: tuple[tuple[Resource, float], ...]

    def __post_init__(self) -> None:
        assert all(seconds >= 0 for _, seconds in self.uses)
        self.uses = tuple(use for use in self.uses if use[1] > 0)
        self.rate = min((1 / seconds for _, seconds in self.uses), default=float("inf"))
        """Units per second if nothing else is under way."""
        self.done = 0.0
        """Units that were begun so far."""
        self.served = 0.0  # units of each piece of work that has been under way from the start
        self.under_way: list[tuple[float, int, Event]] = []  # heap, by the value of `served` at which it ends
        self.share = 0.0  # units per second of each


class Simulation:
    """Runs processes from time 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._soon: deque[Callable[[], None]] = deque()
        self._busy: dict[Path, None] = {}  # in the order in which they became busy
        self._numbers = count()
        self._changed = False

    def soon(self, call: Callable[[], None]) -> None:
        """Call this at the present instant, after what is already to be called."""
        self._soon.append(call)

    def event(self) -> Event:
        return Event(self)

    def start(self, process: Process) -> Event:
        """Run a process from now on; the event is its end."""
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
        """Begin so much work; the event is its end."""
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
        """Until nothing is under way.

        Returns:
            The time then, in seconds.
        """
        while self._soon or self._busy:
            while self._soon:
                self._soon.popleft()()
            if self._busy:
                self._advance()
        return self.now

    def _advance(self) -> None:
        """To the next end of work."""
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
    """Max-min fair: every piece of work gets the same part of its rate alone, until one of its resources is full."""
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
    """Threads that work processes in the order in which they are pushed, as the native core's ``WorkerPool``."""

    def __init__(self, simulation: Simulation, num_threads: int) -> None:
        self._simulation = simulation
        self._idle = num_threads
        self._waiting: deque[tuple[Process, Event]] = deque()

    def push(self, process: Process) -> Event:
        """The event is the process's end."""
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
