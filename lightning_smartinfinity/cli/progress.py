"""Shows the progress of a command."""

from __future__ import annotations

import sys

__all__ = ["Progress"]


class Progress:
    """Prints a line for each tenth of a task.

    Args:
        shown: Whether to print anything.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._last = ("", -1)

    def __call__(self, thing: str, done: int, total: int) -> None:
        """Report that this part of a task is done."""
        tenth = 10 * done // total if total else 10
        if self._shown and (thing, tenth) != self._last:
            self._last = (thing, tenth)
            print(f"{thing}: {10 * tenth} %", file=sys.stderr, flush=True)
