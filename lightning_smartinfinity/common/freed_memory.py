"""Returns freed memory, which the C library keeps, to the system."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["FreedMemory", "return_freed_memory"]


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library supports it.

    glibc serves all but large blocks from heaps, and keeps memory that is freed between blocks in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Returns memory to the system whenever ``batch_bytes`` were freed.

    Rarer calls are cheaper: each one searches all heaps, and also returns memory that would soon be used again.

    Args:
        batch_bytes: Freed bytes after which memory is returned.

    Attributes:
        batch_bytes: Freed bytes after which memory is returned.
    """

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were freed or soon will be."""
        self._nbytes += nbytes
        if self._nbytes >= self.batch_bytes:
            self._nbytes = 0
            return_freed_memory()
