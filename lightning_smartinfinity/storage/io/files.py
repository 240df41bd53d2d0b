"""File calls that are given up if the disk does not answer, as :mod:`~.deadlines` describes."""

from __future__ import annotations

import copy
import errno
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from lightning_smartinfinity import native
from lightning_smartinfinity.storage.io.deadlines import in_time, when_returned

__all__ = [
    "REMEMBERED",
    "LimitedCalls",
    "OpenFile",
    "bounded",
    "is_unused",
    "limited",
    "listed",
    "resolved",
    "transfer_all",
    "unless_removed",
    "write_all",
]

REMEMBERED = 75.0
"""Seconds after which file systems no longer cache whether a name exists. NFS's default is at most 60 (acdirmax), sshfs
caches for 20, FUSE and SMB for 1."""
_GLANCE = 0.05  # seconds

P = ParamSpec("P")
T = TypeVar("T")
Limited = TypeVar("Limited", bound=Callable[..., Any])


def limited(doing: str, path: str | Path, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function with these arguments, limited by :func:`in_time`; return its result or raise its error."""
    return in_time(lambda: function(*args, **kwargs), doing=doing, path=Path(path))


def bounded(doing: str, *, undo: Callable[[Any], object] | None = None) -> Callable[[Limited], Limited]:
    """Decorate a function, whose first argument is a path, so that each call is limited by :func:`in_time`."""

    def decorate(function: Limited) -> Limited:
        @wraps(function)
        def call(path: str | Path, *args: Any, **kwargs: Any) -> Any:
            return in_time(lambda: function(path, *args, **kwargs), doing=doing, path=Path(path), undo=undo)

        return cast(Limited, call)

    return decorate


@bounded("Looking at")
def resolved(path: str | Path) -> Path:
    """Return a path with all links resolved; the path need not exist."""
    return Path(os.path.realpath(path))


@bounded("Reading")
def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """Return a folder's entries that match a pattern, sorted; none if the folder does not exist."""
    return sorted(folder.glob(pattern))


def unless_removed(make: Callable[[], T], *, seconds: float = REMEMBERED) -> T:
    """Call a function, and call it again while it raises FileNotFoundError.

    Another process may just have removed it. Some file systems cache for seconds that it is still there, if another
    machine has removed it: then looking for it, or making it where it may exist, succeeds, and opening it fails.

    Args:
        make: The function.
        seconds: How long to call it again, by default longer than such caches remember.

    Raises:
        FileNotFoundError: It is still gone after that time.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return make()
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_GLANCE)


def is_unused(path: Path) -> bool:
    """Return whether a path does not exist, or is an empty folder; without a time limit.

    Some file systems cache for seconds that a path is still there, if another machine has removed it. Then a folder
    looks empty, and a file cannot be opened.
    """
    if not os.path.lexists(path):
        return True
    try:
        if path.is_dir():
            return not any(path.iterdir())
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except FileNotFoundError:
        return True
    except OSError:
        if path.is_dir():
            raise
    return False


def transfer_all(transfer: Callable[[memoryview, int], int], content: memoryview, offset: int = 0) -> int:
    """Repeat a read or write until it has transferred everything, or transfers nothing more; without a time limit.

    Args:
        transfer: Function that transfers a part of the memory at an offset of a file, and returns the part's bytes.
        content: Bytes to write, or memory to read into.
        offset: Offset of the first byte in the file.

    Returns:
        Number of bytes transferred.
    """
    done = 0
    while done < content.nbytes and (part := transfer(content[done:], offset + done)):
        done += part
    return done


def write_all(write: Callable[[memoryview, int], int], content: memoryview, offset: int = 0) -> None:
    """Repeat a write as :func:`transfer_all` does; raise OSError if it writes nothing more."""
    if transfer_all(write, content, offset) < content.nbytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class OpenFile:
    """An open file. It stays open until no call that was given up can use its descriptor.

    Args:
        path: Path of the file.
        flags: Flags of ``os.open``.
        doing: Action for the error message if the file cannot be opened in time.
        cached_bytes: Number of transferred bytes after which the file is flushed and dropped from the page cache; None
            to leave it there.

    Attributes:
        path: As passed.
        descriptor: The descriptor; -1 after :meth:`close`.

    Raises:
        OSError: The file cannot be opened.
        StorageTimeoutError: The disk does not answer; also raised by the methods.
    """

    def __init__(self, path: Path, flags: int, *, doing: str = "Opening", cached_bytes: int | None = None) -> None:
        self.path = path
        self._before = time.monotonic()
        self._writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        self._most_cached, self._cached = cached_bytes, 0
        opening = partial(os.open, path, flags | os.O_CLOEXEC, 0o666)
        self.descriptor = in_time(opening, doing=doing, path=path, undo=os.close)

    def write_all(self, content: memoryview, offset: int) -> None:
        """Write everything at an offset of the file."""
        write_all(self._write, content, offset)

    def read_all(self, content: memoryview, offset: int) -> int:
        """Fill memory from an offset of the file; return the number of bytes, fewer only at the end of the file."""
        return transfer_all(self._read, content, offset)

    def _write(self, content: memoryview, offset: int) -> int:
        return self._counted(limited("Writing", self.path, os.pwrite, self.descriptor, content, offset))

    def _read(self, content: memoryview, offset: int) -> int:
        return self._counted(limited("Reading", self.path, os.preadv, self.descriptor, [content], offset))

    def _counted(self, nbytes: int) -> int:
        # A file larger than memory would displace all other data in the page cache.
        self._cached += nbytes
        if self._most_cached is not None and self._cached >= self._most_cached:
            self.flush()
        return nbytes

    def flush(self) -> None:
        """Flush written bytes to the device, and drop the file from the page cache unless ``cached_bytes`` is None."""
        limited("Flushing", self.path, self._flush)
        self._cached = 0

    def _flush(self) -> None:
        if self._writes:
            os.fdatasync(self.descriptor)
        if self._most_cached is not None:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            when_returned(partial(os.close, descriptor), since=self._before)


class LimitedCalls:
    """Makes calls for a store's files, with the kind of time limit that suits the files.

    Args:
        files: The files. Flushing them may take long unless they all have direct I/O.
        seconds: ``TransferConfig.io_timeout``.
    """

    def __init__(self, files: Iterable[native.StateFile], *, seconds: float) -> None:
        self._are_direct = all(file.direct for file in files)
        self._seconds = seconds

    def within(self, seconds: float) -> LimitedCalls:
        """Return a copy with this limit, in seconds, for each call, also while the disk completes other requests."""
        if seconds == math.inf:
            return self
        limited = copy.copy(self)
        limited._are_direct, limited._seconds = True, min(self._seconds, max(seconds, 0.0))
        return limited

    def __call__(self, doing: str, path: Path, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Act as :func:`limited`, but with direct I/O, the limit does not restart while the disk works."""
        call, renews = partial(function, *args, **kwargs), not self._are_direct
        return in_time(call, doing=doing, path=path, seconds=self._seconds, renews=renews)
