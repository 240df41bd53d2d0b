"""Compares how long forwards that offload take with one that kept everything."""

from __future__ import annotations

from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory, share_of_memory

__all__ = ["Slowdown"]

_NUM_COMPARED = 3  # forwards: a single one may be slow for any reason
_LEAST_SECONDS = 0.1  # of a forward and its backward: shorter ones vary too much
_TENTH = 10  # one over the share by which shares may differ
_SHARE_OF_MEMORY = 8  # one over the share of free memory that may be taken, since other ranks take some, too


class Slowdown:
    """Compares the time per saved byte of forwards, together with their backwards, on a processor that runs both.

    There, copies, checksums and interrupts of a drive take time from the computation. How much that is depends on the
    machine: the processor time of the transfers is the smallest part, because all threads of an operation wait for the
    one that was interrupted, and because a virtual machine's host may run its drives on the same cores.
    """

    def __init__(self) -> None:
        self._kept: float | None = None  # seconds per byte of the last forward that kept everything
        self._excesses: list[float] = []
        self._has_asked = False
        self._share = 0.0  # of what is saved, that the compared forwards offload

    def ask_to_keep_all(self, last: Forward) -> bool:
        """Return whether the next forward is to keep everything. That is so once, if there is memory for it."""
        if self._has_asked or last.busy_seconds < _LEAST_SECONDS:
            return False
        self._has_asked = True
        report = measure_memory(reserved=0)
        return _SHARE_OF_MEMORY * last.saved_bytes <= share_of_memory([report], report)

    def excess(self, last: Forward) -> float:
        """Return by what share of its time each of three forwards was slower than one that kept everything.

        These are the first three that offload about the share which :meth:`expect` was told last. What later ones take
        depends on more than what they offload, for instance on what else is overlapped with them. It is 0 for these, or
        if one of the three was not slower.
        """
        pace = last.seconds / last.saved_bytes
        if not last.limit:
            self._kept = pace
        elif self._kept is not None and last.busy_seconds >= _LEAST_SECONDS and len(self._excesses) < _NUM_COMPARED:
            self._excesses.append(pace / self._kept - 1)
            if len(self._excesses) == _NUM_COMPARED:
                return max(0.0, min(self._excesses))
        return 0.0

    def expect(self, share: float) -> None:
        """Compare the next forwards, unless they offload about the same share of what they save as those before."""
        if _TENTH * abs(share - self._share) > self._share:
            self._share = share
            self._excesses.clear()
