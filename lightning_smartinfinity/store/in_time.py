"""Calls to a file system that are given up when its disk does not answer.

Reads and writes of state have their deadlines in the native core. This is for what is done once a step or less: the
commit record, flushing, and closing and deleting files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from lightning_smartinfinity import native
from lightning_smartinfinity.config import IO_TIMEOUT
from lightning_smartinfinity.errors import StorageTimeoutError

__all__ = ["in_time"]

T = TypeVar("T")

_POLL = 0.05


class _Call(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, function: Callable[[], T], folder: Path) -> None:
        self._function = function
        self.folder = folder
        self.returned = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
        self.returned.set()

    def result(self) -> T:
        """Return what the function returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]


_given_up: list[_Call[object]] = []


def in_time(function: Callable[[], T], *, doing: str, path: Path, seconds: float = IO_TIMEOUT) -> T:
    """Call a function in another thread and return what it returns, or raise what it raises.

    A call that is given up goes on, and may still change the file. Until it has returned, later calls for the same
    folder are refused. The time for which the process was stopped, as by a debugger, does not count. What a signal
    handler raises meanwhile, such as that of Ctrl-C, is raised once the call has returned or was given up.

    Args:
        function: The function.
        doing: What it does, such as ``"Flushing"``, for the error.
        path: The file that it does it to.
        seconds: The limit; at most :func:`native.ending_seconds` once the process was asked to end.

    Raises:
        StorageTimeoutError: It has not returned in time.
    """
    _refuse_behind(path)
    call = _Call(function, path.parent)
    interrupt: BaseException | None = None
    try:
        threading.Thread(target=call.make, daemon=True, name="smart-inf-call").start()
    except RuntimeError:  # no thread can be started, as when the interpreter ends
        return function()
    except BaseException as error:
        interrupt = error
    left, waited = seconds, 0.0  # by the waits, not by the clock: it runs on while the process is stopped
    while not call.returned.is_set() and left > 0:
        try:
            if (ending := native.ending_seconds()) is not None:
                left, seconds = min(left, ending), min(seconds, ending)
            wait, left, waited = min(_POLL, left), left - _POLL, waited + _POLL
            call.returned.wait(wait)
        except BaseException as error:  # a signal handler may raise anything
            native.ask_to_end()
            interrupt = interrupt or error
    if not call.returned.is_set():
        _given_up.append(call)  # type: ignore[arg-type]
        native.note_given_up(waited)
    if interrupt is not None:
        raise interrupt
    if not call.returned.is_set():
        raise StorageTimeoutError(
            f"{doing} {str(path)!r} did not return within {seconds:g} s.", StorageTimeoutError.REMEDY
        )
    return call.result()


def _refuse_behind(path: Path) -> None:
    _given_up[:] = [call for call in _given_up if not call.returned.is_set()]
    if any(call.folder == path.parent for call in _given_up):
        raise StorageTimeoutError(f"{str(path.parent)!r} has not answered an earlier call.", StorageTimeoutError.REMEDY)
