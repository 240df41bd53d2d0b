"""Returns memory to the system that was freed, and that the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["FreedMemory", "return_freed_memory"]


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can.

    glibc serves all but large blocks from heaps, and keeps what is freed there between blocks that are in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Returns memory to the system whenever enough of it was freed.

    It is done seldom, since every call searches all heaps, and what is about to be used again goes, too.

    Args:
        batch_bytes: Bytes that are returned together.

    Attributes:
        batch_bytes: Bytes that are returned together.
    """

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were freed, or soon will be."""
        self._nbytes += nbytes
        if self._nbytes >= self.batch_bytes:
            self._nbytes = 0
            return_freed_memory()
