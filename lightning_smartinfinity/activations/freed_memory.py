"""Gives memory back to the system that torch has freed, and that the C library keeps."""

from __future__ import annotations

import ctypes

__all__ = ["FreedMemory"]

_GRANULE = 32 << 20  # bytes


class FreedMemory:
    """Gives memory back in granules.

    torch's tensors on the CPU are memory of the C library. That serves all but the largest from one heap, which keeps
    what is freed between pieces that are in use. Forward leaves many such gaps when its tensors move to storage.
    """

    def __init__(self) -> None:
        # Only glibc has it. Elsewhere the C library does as it likes.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were freed, or soon will be."""
        self._nbytes += nbytes
        if self._nbytes >= _GRANULE:
            self.give_back()

    def give_back(self) -> None:
        """Give back what is free now, if anything was freed since the last time."""
        if self._nbytes and self._trim is not None:
            self._trim(0)
        self._nbytes = 0
