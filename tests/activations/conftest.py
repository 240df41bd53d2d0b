"""Settings for the tests of activations on storage."""

from __future__ import annotations

import math

import pytest

from lightning_smartinfinity.activations import slowdown


@pytest.fixture(autouse=True)
def nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves does not depend on how busy the machine is: all forwards are too short to be compared."""
    monkeypatch.setattr(slowdown, "_LEAST_SECONDS", math.inf)
