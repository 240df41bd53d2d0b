"""Measures how many bytes per second storage writes and reads while activations keep it busy."""

from __future__ import annotations

import time

from lightning_smartinfinity import native

__all__ = ["Rates"]


class _Rate:
    """Bytes and seconds of one direction, over intervals during all of which a transfer was in progress."""

    def __init__(self) -> None:
        self._bytes_before, self._since = 0, 0.0
        self._was_busy = False
        self._nbytes, self._seconds = 0, 0.0

    def note(self, nbytes: int, *, busy: bool) -> None:
        now = time.perf_counter()
        if self._was_busy and busy:
            self._nbytes += nbytes - self._bytes_before
            self._seconds += now - self._since
        self._bytes_before, self._since, self._was_busy = nbytes, now, busy

    def take(self) -> float:
        """Return the bytes per second since the last call; 0 if that is not known."""
        rate = self._nbytes / self._seconds if self._seconds else 0.0
        self._nbytes, self._seconds = 0, 0.0
        return rate


class Rates:
    """Rates at which storage was seen to write and to read.

    Attributes:
        write: Bytes per second that it wrote; 0 if that is not known.
        read: Bytes per second that it read; 0 if that is not known.
    """

    def __init__(self) -> None:
        self._write, self._read = _Rate(), _Rate()
        self.write = self.read = 0.0

    def note(self, counters: native.Counters, *, writing: bool, reading: bool) -> None:
        """Take the counters of the store, and whether a write and a read are in progress now."""
        self._write.note(counters.written_bytes, busy=writing)
        self._read.note(counters.read_bytes, busy=reading)

    def update(self, counters: native.Counters) -> None:
        """Compute both rates from what was seen since the last call.

        A device that always ends before it is looked at is at least as fast as each of its requests.
        """
        slowest_write = counters.written_bytes / counters.write_seconds if counters.write_seconds else 0.0
        slowest_read = counters.read_bytes / counters.read_seconds if counters.read_seconds else 0.0
        self.write = self._write.take() or max(self.write, slowest_write)
        self.read = self._read.take() or max(self.read, slowest_read)
