"""Measures the rates of storage and of copies from and to devices, in bytes per second."""

from __future__ import annotations

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.cuda.clock import CopyTimes

__all__ = ["Rates"]


class Rates:
    """Measured rates, in bytes per second, of the time in which transfers run. A rate is 0 if it is unknown.

    Attributes:
        copies_out: Timed copies from devices.
        copies_in: Timed copies to devices.
        copied_out: Rate of copies from devices.
        copied_in: Rate of copies to devices.
        write: Rate of writes to storage.
        read: Rate of reads from storage.
        is_reading: Whether storage has read since the update before the last one.
    """

    def __init__(self) -> None:
        self._written = self._was_read = self._was_out = self._was_in = (0, 0.0)
        self.copies_out, self.copies_in = CopyTimes(), CopyTimes()
        self.write = self.read = self.copied_out = self.copied_in = 0.0
        self.is_reading = False

    def update(self, counters: native.Counters) -> None:
        """Compute each rate from the transfers since the last call; without a transfer a rate does not change."""
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
