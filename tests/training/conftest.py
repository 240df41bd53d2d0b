"""Fixtures for every test that trains."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """Set Python's own Ctrl-C handler for each test.

    Lightning ignores Ctrl-C after the first one, and so does a process that a shell starts in the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
