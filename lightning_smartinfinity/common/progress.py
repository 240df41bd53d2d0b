"""Shows the progress of long work: bytes done, total bytes, rate, and time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from tqdm import tqdm

__all__ = ["DELAY", "Advance", "Show", "hidden", "showing_progress"]

DELAY = 10.0
"""Seconds after which a bar appears. Shorter work shows none."""

_LINES_APART = 10.0  # seconds between lines in a log file, where tqdm cannot overwrite the previous line

Advance = Callable[[int], object]
"""Function that takes the number of bytes done since the last call."""

Show = Callable[[str, int], AbstractContextManager[Advance]]
"""Function that shows work, given its name and number of bytes, as :func:`showing_progress` does."""


@contextmanager
def showing_progress(what: str, total_bytes: int | None = None, *, shown: bool) -> Iterator[Advance]:
    """Show a bar on the standard error stream while the body runs, if the body takes longer than :data:`DELAY`.

    Args:
        what: Description of the work, such as ``"Writing optimizer state"``.
        total_bytes: Number of bytes to do; None if it is unknown.
        shown: Whether this process shows anything; usually only rank 0 does.

    Yields:
        Function to call with the number of bytes done since the last call.
    """
    interval = 0.1 if sys.stderr is not None and sys.stderr.isatty() else _LINES_APART
    with tqdm(
        desc=what,
        total=total_bytes,
        unit="B",
        unit_scale=True,
        delay=DELAY,
        mininterval=interval,
        maxinterval=max(interval, DELAY),
        disable=not shown or sys.stderr is None,
    ) as bar:
        yield bar.update


hidden: Show = partial(showing_progress, shown=False)
"""Shows nothing."""
