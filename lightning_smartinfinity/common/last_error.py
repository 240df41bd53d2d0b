"""Finds the error that ends the script, for functions that run at the interpreter's exit.

Python stores an exception that no code caught in ``sys.last_value``, except ``SystemExit``. So an exit handler cannot
distinguish ``sys.exit(1)``, for instance in a handler of SIGTERM, from the normal end of the script.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import NoReturn

__all__ = ["last_error", "notice_exit"]


class _Exit:
    """Calls the original ``sys.exit``, and keeps its last call in the main thread.

    Attributes:
        error: The exception that the call raised, unless its status means success.
    """

    def __init__(self, original: Callable[..., NoReturn]) -> None:
        self._original = original
        self.error: SystemExit | None = None

    def __call__(self, *status: object) -> NoReturn:
        try:
            self._original(*status)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                failed = error.code is not None and not (isinstance(error.code, int) and error.code == 0)
                self.error = SystemExit(error.code) if failed else None
            raise


def notice_exit() -> None:
    """Notice calls of ``sys.exit`` from now on, when a training begins; forget earlier ones, which were caught."""
    if isinstance(sys.exit, _Exit):
        sys.exit.error = None
    else:
        sys.exit = _Exit(sys.exit)


def last_error() -> BaseException | None:
    """Return the error that is being handled or has ended the script, None if there is none.

    A ``sys.exit`` with an error counts only after the last :func:`notice_exit`, and even if the script caught it.
    """
    of_exit = sys.exit.error if isinstance(sys.exit, _Exit) else None
    return sys.exc_info()[1] or getattr(sys, "last_value", None) or of_exit
