"""Errors of ours that a test expects: they name the values at fault and end in a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_smartinfinity import SmartInfinityError

__all__ = ["assert_helpful", "refused"]


def assert_helpful(error: SmartInfinityError, *values: str) -> None:
    """Assert that the message names the values at fault and ends in a remedy."""
    assert error.remedy.endswith("."), error
    for value in values:
        assert value in str(error), f"{value!r} is not named in: {error}"


@contextmanager
def refused(kind: Any, *values: str, match: str | None = None, remedy: str = "") -> Iterator[None]:
    """Assert that an error of ours is raised within, which names the values and has these words in its remedy."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert_helpful(caught.value, *values)
    assert remedy in caught.value.remedy
