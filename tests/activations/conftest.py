"""Settings for the tests of activations on storage."""

from __future__ import annotations

import math

import pytest

from lightning_smartinfinity.activations.tuning import tuner
from tests.training.conftest import sigint

__all__ = ["nothing_is_compared", "sigint"]


@pytest.fixture(autouse=True)
def nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all forwards for too short to be compared, so that no test depends on how busy the machine is."""
    monkeypatch.setattr(tuner, "_LEAST_SECONDS", math.inf)
