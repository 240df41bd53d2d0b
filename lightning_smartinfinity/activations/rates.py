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
        self._updated_at = (0, 0.0)

    def note(self, nbytes: int, *, busy: bool) -> None:
        now = time.perf_counter()
        if self._was_busy and busy:
            self._nbytes += nbytes - self._bytes_before
            self._seconds += now - self._since
        self._bytes_before, self._since, self._was_busy = nbytes, now, busy

    def update(self, nbytes: int, seconds: float, *, known: float) -> float:
        """Return the bytes per second since the last call; what was known before if nothing was transferred.

        Both what was seen and the mean of single requests are at most the rate of a device that has enough to do.

        Args:
            nbytes: Bytes of all requests.
            seconds: Their seconds, added up.
            known: Bytes per second that were known before.
        """
        seen = self._nbytes / self._seconds if self._seconds else 0.0
        nbytes_before, seconds_before = self._updated_at
        single = (nbytes - nbytes_before) / (seconds - seconds_before) if seconds > seconds_before else 0.0
        self._nbytes, self._seconds, self._updated_at = 0, 0.0, (nbytes, seconds)
        return max(seen, single) or known


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
        """Compute both rates from what was seen since the last call."""
        self.write = self._write.update(counters.written_bytes, counters.write_seconds, known=self.write)
        self.read = self._read.update(counters.read_bytes, counters.read_seconds, known=self.read)
