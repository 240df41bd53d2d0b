"""Calls that a store makes to its disks, and gives up if these do not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from lightning_smartinfinity import native
from lightning_smartinfinity.storage.io.deadlines import in_time, unless_idle

__all__ = ["LimitedCalls"]

T = TypeVar("T")


class LimitedCalls:
    """Chooses how long a call for a store's files may take.

    Args:
        files: The files. What of them lies in the page cache may take long to flush.
        seconds: ``TransferConfig.io_timeout``.
    """

    def __init__(self, files: Iterable[native.StateFile], *, seconds: float) -> None:
        self._are_direct = all(file.direct for file in files)
        self._seconds = seconds

    def __call__(self, function: Callable[[], T], *, doing: str, path: Path) -> T:
        """Call a function and return its result, in time (:func:`in_time`) or unless its disk is idle.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        call = in_time if self._are_direct else unless_idle
        return call(function, doing=doing, path=path, seconds=self._seconds)
