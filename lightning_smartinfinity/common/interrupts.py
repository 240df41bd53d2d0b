"""Holds Ctrl-C and SIGTERM back while a training changes what it could not undo, and until the change is recorded.

With state in memory only, an exception between an optimizer step and the record of that step would leave a state that
belongs to no record, from which no training resumes. A second signal is never held back, and none for longer than five
seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["HeldSignals", "dies_of_sigterm", "end_on_sigterm"]

_LONGEST = 5.0  # seconds


class HeldSignals:
    """Holds the handling of SIGINT, and of a SIGTERM of :func:`end_on_sigterm`, back between two of its calls.

    It has no effect outside of the main thread, where Python runs no signal handlers.
    """

    def __init__(self) -> None:
        self._holds = False
        self._waiting: Callable[[], Any] | None = None
        self._timer: threading.Timer | None = None

    def hold(self) -> None:
        """Hold signals back from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if isinstance(handler, _Handler):
                handler.held = self
            elif number == signal.SIGINT and callable(handler):
                signal.signal(number, _Handler(handler, self))
        self._holds = True

    def release(self) -> None:
        """Hold signals no longer, and handle the one that was held: this may raise KeyboardInterrupt or SystemExit."""
        waiting = self.drop()
        if waiting is not None:
            waiting()

    def drop(self) -> Callable[[], Any] | None:
        """Hold signals no longer, and return what would handle the one that was held; None if none was."""
        self._holds = False
        waiting, self._waiting = self._waiting, None
        if self._timer is not None:
            self._timer.cancel()
        return waiting

    def takes(self, number: int, handle: Callable[[], Any]) -> bool:
        """Return whether a signal of this number is held back, and keep what handles it."""
        if not self._holds or self._waiting is not None:
            self.drop()  # handling one is enough: another one would interrupt what the first one lets end
            return False
        self._waiting = handle
        self._timer = threading.Timer(_LONGEST, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()
        return True


class _Handler:
    """A signal handler in front of another one."""

    def __init__(self, before: Callable[[int, FrameType | None], Any], held: HeldSignals | None = None) -> None:
        self.before, self.held = before, held

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self.held is None or not self.held.takes(number, lambda: self.before(number, None)):
            self.before(number, frame)


def end_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit in the main thread, where it would otherwise kill this process at once."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Handler(_exit))


def dies_of_sigterm() -> None:
    """Undo :func:`end_on_sigterm`."""
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(handler, _Handler) and handler.before is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # which exit handlers notice
