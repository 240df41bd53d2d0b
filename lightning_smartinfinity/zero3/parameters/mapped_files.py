"""Takes files that are mapped into memory out of it again, while a model is loaded from them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["MappedFiles"]

# Linux writes what was changed to swap, if there is any, and drops what can be read again: no content is lost.
_MADV_PAGEOUT = 21
_BATCH_BYTES = 64 * 1024 * 1024


class MappedFiles:
    """Mapped files whose pages leave memory whenever this many bytes more have been read: 64 MiB."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._nbytes = 0

    def add(self, path: str | os.PathLike[str]) -> None:
        """Report that a file may be mapped."""
        self._paths.add(os.path.realpath(path))

    def count(self, nbytes: int) -> None:
        """Report that this number of bytes was read, and is not needed any more."""
        self._nbytes += nbytes
        if self._nbytes >= _BATCH_BYTES:
            self._nbytes = 0
            self._page_out()

    def _page_out(self) -> None:
        with suppress(OSError, AttributeError):  # no /proc, or a C library without madvise
            madvise = ctypes.CDLL(None).madvise
            for begin, end in self._mappings():
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT)

    def _mappings(self) -> Iterator[tuple[int, int]]:
        for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
            addresses, *_, path = line.split(maxsplit=5)
            if path in self._paths:
                begin, end = addresses.split("-")
                yield int(begin, 16), int(end, 16)
