"""How far a command is."""

from __future__ import annotations

import sys

__all__ = ["Progress"]


class Progress:
    """A line on the terminal, or of a log, for each tenth of a thing.

    Args:
        shown: False: none.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._last = ("", -1)

    def __call__(self, thing: str, done: int, total: int) -> None:
        """So much of it is done."""
        tenth = 10 * done // total if total else 10
        if self._shown and (thing, tenth) != self._last:
            self._last = (thing, tenth)
            print(f"{thing}: {10 * tenth} %", file=sys.stderr, flush=True)
