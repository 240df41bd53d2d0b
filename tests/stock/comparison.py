"""Marks for tests that run for stock and for ours."""

from __future__ import annotations

import pytest

OURS = "smart_infinity"


def stock_fails(reason: str, *values: object) -> object:
    """A parameter set for stock, which is documented to fail an assertion.

    Strictly: the day that it passes, the reason is gone.
    """
    mark = pytest.mark.xfail(reason=f"stock: {reason}", strict=True, raises=AssertionError)
    return pytest.param("stock", *values, marks=mark)
