"""Gives memory back to the system that torch has freed, and that the C library keeps."""

from __future__ import annotations

import ctypes

__all__ = ["FreedMemory"]

_LEAST_GRANULE = 256 << 20  # bytes; less is not worth the time
_SHARE_OF_SAVED = 2  # one over the share of what a forward saves that is given back together


class FreedMemory:
    """Gives memory back in granules: a few times in a forward and in its backward.

    torch's tensors on the CPU are memory of the C library. That serves all but the largest from one heap, which keeps
    what is freed between pieces that are in use. Forward leaves many such gaps when its tensors move to storage. What
    is given back also includes what torch is about to use again, and the system has to provide that anew; hence it is
    done seldom.
    """

    def __init__(self) -> None:
        # Only glibc has it. Elsewhere the C library does as it likes.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._nbytes = 0

    def add(self, nbytes: int, *, most_saved: int) -> None:
        """Count bytes that were freed, or soon will be.

        Args:
            nbytes: The bytes.
            most_saved: Bytes that the largest forward saved.
        """
        self._nbytes += nbytes
        if self._nbytes >= max(_LEAST_GRANULE, most_saved // _SHARE_OF_SAVED):
            if self._trim is not None:
                self._trim(0)
            self._nbytes = 0
