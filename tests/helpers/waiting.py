"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["await_that"]


def await_that(condition: Callable[[], bool], *, seconds: float = 30) -> None:
    """Return once it is so; an AssertionError if it does not become so in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)
