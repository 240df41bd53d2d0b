"""What every test that trains leaves behind it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """Lightning ignores Ctrl-C once it has noticed one; the next test may need it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
