"""Calls of a store to its disks, which it gives up if the disks do not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from lightning_smartinfinity import native
from lightning_smartinfinity.storage.io.deadlines import in_time, unless_idle

__all__ = ["LimitedCalls"]

T = TypeVar("T")


class LimitedCalls:
    """Makes calls for a store's files, with the kind of time limit that suits the files.

    Args:
        files: The files. Flushing them may take long unless they all have direct I/O.
        seconds: ``TransferConfig.io_timeout``.
    """

    def __init__(self, files: Iterable[native.StateFile], *, seconds: float) -> None:
        self._are_direct = all(file.direct for file in files)
        self._seconds = seconds

    def __call__(self, function: Callable[[], T], *, doing: str, path: Path) -> T:
        """Call a function and return its result, by :func:`in_time` with direct I/O, else by :func:`unless_idle`.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        call = in_time if self._are_direct else unless_idle
        return call(function, doing=doing, path=path, seconds=self._seconds)
