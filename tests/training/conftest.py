"""What every test that trains leaves behind it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """Lightning ignores Ctrl-C once it has noticed one, and so does what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
