"""Marks for tests that run with stock and with our strategy."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

OURS = "smart_infinity"


def stock_fails(reason: str, *values: object, marks: Iterable[pytest.MarkDecorator] = ()) -> object:
    """Return a parameter set for stock that is documented to fail an assertion.

    The mark is strict: if stock passes, the test fails, since the reason no longer holds.
    """
    fails = pytest.mark.xfail(reason=f"stock: {reason}", strict=True, raises=AssertionError)
    return pytest.param("stock", *values, marks=[fails, *marks])
