"""Cases of a parametrized test of which only some run in every ``make test``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def long_but(usual: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases for ``parametrize``, all of them marked ``long`` but the usual ones.

    Args:
        usual: Cases that always run, each of them one of ``cases``.
        cases: All cases: values, or tuples of values.
    """
    always, found = list(usual), list(cases)
    assert all(case in found for case in always), "a case that always runs is none of the cases"
    return [case if case in always else _long(case) for case in found]


def _long(case: Any) -> Any:
    values: Sequence[Any] = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
