"""Times on a CUDA device, from events on torch's streams, which the host reads later without waiting now."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch

__all__ = ["CopyTimes", "DeviceClock", "now_on"]

_MS = 1e-3


def now_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event that takes the time when the device has done all work given to a stream so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return _MS * float(begin.elapsed_time(end))


class CopyTimes:
    """Bytes and seconds of copies.

    Attributes:
        nbytes: Bytes of the copies that :meth:`look` has counted.
        seconds: Seconds of these copies.
    """

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._copies: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    def add(self, begin: torch.cuda.Event, end: torch.cuda.Event, nbytes: int) -> None:
        """Add a copy between two events."""
        self.look()  # so that only copies in progress are queued
        self._copies.append((begin, end, nbytes))

    def look(self) -> None:
        """Count the copies that have ended."""
        while self._copies and self._copies[0][1].query():  # type: ignore[no-untyped-call]
            begin, end, nbytes = self._copies.popleft()
            self.nbytes += nbytes
            self.seconds += _seconds(begin, end)


class DeviceClock:
    """Times of one forward and its backward on a device, in seconds since the clock was created.

    Args:
        device: The device. Other work of torch's current streams there also counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._now()
        self._packed: list[tuple[torch.cuda.Event, int]] = []  # with the number of hold-ups before
        self._held_up: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._ended: torch.cuda.Event | None = None
        self._used: list[torch.cuda.Event] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._num_waits = 0  # before backward used its last entry

    def pack(self) -> None:
        """Record when an entry was packed."""
        self._packed.append((self._now(), len(self._held_up)))

    def end(self) -> None:
        """Record when forward ended, unless that was recorded."""
        self._ended = self._ended or self._now()

    def use(self) -> None:
        """Record when backward uses an entry for the first time."""
        self.end()
        self._used.append(self._now())
        self._num_waits = len(self._waits)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record for how long the device waits for copies that are ordered in this context."""
        begin = self._now()
        yield
        self._waits.append((begin, self._now()))

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Exclude the time for which the device is idle because of this context from the times of forward."""
        begin = self._now()
        yield
        self._held_up.append((begin, self._now()))

    def wait(self) -> None:
        """Wait until the device has reached all events."""
        for event in (*(event for event, _ in self._packed), self._ended, *self._used):
            if event is not None:
                event.synchronize()

    @property
    def times(self) -> list[float]:
        """When each entry was packed."""
        waits = list(accumulate((_seconds(*wait) for wait in self._held_up), initial=0.0))
        return [_seconds(self._began, event) - waits[num] for event, num in self._packed]

    @property
    def forward_seconds(self) -> float:
        """When forward ended, without hold-ups."""
        assert self._ended is not None
        return _seconds(self._began, self._ended) - sum(_seconds(*wait) for wait in self._held_up)

    @property
    def backward_seconds(self) -> float:
        """Time of backward from its first entry to its last, without waits for copies."""
        if not self._used:
            return 0.0
        return _seconds(self._used[0], self._used[-1]) - sum(_seconds(*wait) for wait in self._waits[: self._num_waits])

    def _now(self) -> torch.cuda.Event:
        return now_on(torch.cuda.current_stream(self._device))
