"""Measures how many bytes per second storage, and copies from and to devices, move."""

from __future__ import annotations

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.cuda.clock import CopyTimes

__all__ = ["Rates"]


class Rates:
    """Rates at which storage was seen to write and to read. Times in which it had nothing to do do not count.

    Attributes:
        copies_out: Copies from devices that were timed.
        copies_in: Copies to devices that were timed.
        copied_out: Bytes per second that were copied from devices; 0 if that is not known.
        copied_in: Bytes per second that were copied to devices; 0 if that is not known.
        write: Bytes per second that it wrote; 0 if that is not known.
        read: Bytes per second that it read; 0 if that is not known.
        is_reading: Whether it has read since the update before the last one.
    """

    def __init__(self) -> None:
        self._written = self._was_read = self._was_out = self._was_in = (0, 0.0)
        self.copies_out, self.copies_in = CopyTimes(), CopyTimes()
        self.write = self.read = self.copied_out = self.copied_in = 0.0
        self.is_reading = False

    def update(self, counters: native.Counters) -> None:
        """Compute all rates from what was transferred since the last call; without a transfer a rate stays."""
        written = (counters.written_bytes, counters.write_busy_seconds)
        was_read = (counters.read_bytes, counters.read_busy_seconds)
        self.write = _rate(self._written, written) or self.write
        read = _rate(self._was_read, was_read)
        self.read, self.is_reading = read or self.read, read > 0
        self._written, self._was_read = written, was_read
        for times in (self.copies_out, self.copies_in):
            times.look()
        was_out, was_in = ((times.nbytes, times.seconds) for times in (self.copies_out, self.copies_in))
        self.copied_out = _rate(self._was_out, was_out) or self.copied_out
        self.copied_in = _rate(self._was_in, was_in) or self.copied_in
        self._was_out, self._was_in = was_out, was_in


def _rate(before: tuple[int, float], now: tuple[int, float]) -> float:
    seconds = now[1] - before[1]
    return (now[0] - before[0]) / seconds if seconds > 0 else 0.0
