"""Rules define the values that a setting may have. An error names class, value and remedy."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.settings.rules import (
    FLAG,
    STRATEGY,
    Rule,
    among,
    between,
    check,
    instance,
    number,
    one_of,
    optional,
    positive,
    require,
    require_distinct,
)

RULES = {
    "between": between(2, 8),
    "at least": between(2),
    "number": number(0.5, 4),
    "positive": positive(4),
    "above": positive(),
    "among": among((2, 4)),
    "words": one_of("auto", "on"),
    "instance": instance(timedelta),
    "flag": FLAG,
    "none": optional(between(2, 8)),
    "word": optional(between(2, 8), "auto"),
}
ANYTHING: tuple[Any, ...] = (None, "", "auto", "2", True, False, 0, 1, 2, 3, 4, 9, -1, 0.0, 0.5, 2.0, 4.5, math.nan)
ANYTHING += (math.inf, -math.inf, 10**400, -(10**400), Fraction(1, 10**400), Fraction(5, 2), [], {}, (2,))
ANYTHING += (
    np.int64(2),
    np.float32(0.5),
    np.array([2, 4]),
    np.array("auto"),
    np.True_,
    timedelta(1),
    timedelta,
    object(),
)


def allowed(name: str) -> list[Any]:
    return [value for value in ANYTHING if RULES[name].holds(value)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("between", [2, 3, 4, np.int64(2)]),
        ("at least", [2, 3, 4, 9, 10**400, np.int64(2)]),
        ("number", [1, 2, 3, 4, 0.5, 2.0, Fraction(5, 2), np.int64(2), np.float32(0.5)]),
        ("positive", [1, 2, 3, 4, 0.5, 2.0, Fraction(5, 2), np.int64(2), np.float32(0.5)]),
        ("among", [2, 4, np.int64(2)]),
        ("words", ["auto"]),
        ("instance", [timedelta(1)]),
        ("flag", [True, False]),
        ("none", [None, 2, 3, 4, np.int64(2)]),
        ("word", ["auto", 2, 3, 4, np.int64(2)]),
    ],
)
def test_what_is_allowed(name: str, expected: list[Any]) -> None:
    """Each rule holds for the values in its range only.

    A bool is no number, and an array is no word. No value makes the rule raise.
    """
    assert [repr(value) for value in allowed(name)] == [repr(value) for value in expected]


@given(st.integers(), st.integers(), st.integers())
def test_both_ends_are_included(least: int, most: int, value: int) -> None:
    """Both ends of a range are allowed."""
    assert between(least, most).holds(value) == (least <= value <= most)


@pytest.mark.parametrize("name", RULES)
def test_what_is_kept_is_allowed(name: str) -> None:
    """A checked value passes a second check unchanged, as in a copied dataclass. NumPy numbers become Python's."""
    for value in allowed(name):
        kept = check("Ring", "size", value, RULES[name])
        assert kept == value or (kept == math.inf and value > sys.float_info.max)
        assert check("Ring", "size", kept, RULES[name]) is kept
        if name not in ("number", "instance"):
            assert type(kept).__module__ == "builtins"


@pytest.mark.parametrize(
    ("owner", "value", "rule", "message"),
    [
        ("Ring", 9, between(2, 8), "Ring(size=9) is out of range. Pass an int from 2 to 8."),
        ("Ring", 1, between(2), "Ring(size=1) is out of range. Pass an int of at least 2."),
        ("Ring", 0, positive(1), "Ring(size=0) is out of range. Pass a number above 0 and at most 1."),
        ("Ring", "x", one_of("a", "b"), "Ring(size='x') is unknown. Use one of: 'a', 'b'."),
        (STRATEGY, 1, FLAG, "size=1 of the smart_infinity strategy is not a bool. Pass True or False."),
        (
            "Ring",
            "all",
            optional(between(0), "auto"),
            "Ring(size='all') is out of range. Pass an int of at least 0, or 'auto'.",
        ),
        ("Ring", 60, optional(instance(timedelta)), "Ring(size=60) is not a timedelta. Pass a timedelta, or None."),
    ],
)
def test_error(owner: str, value: object, rule: Rule, message: str) -> None:
    """An error names the owner, the value and the remedy."""
    with pytest.raises(ConfigError) as caught:
        check(owner, "size", value, rule)
    assert str(caught.value) == message


def test_more_digits_than_python_writes() -> None:
    """A number with too many digits to print gives the error about its range."""
    with pytest.raises(ConfigError, match=r"Ring\(size=<too many digits to show>\) is out of range"):
        check("Ring", "size", 10**5000, between(2, 8))


@dataclass(frozen=True)
class Ring:
    """A dataclass with checked fields."""

    size: int
    share: float = 1.0

    def __post_init__(self) -> None:
        require(self, size=between(1), share=positive(1))


def test_fields_of_a_frozen_dataclass() -> None:
    """Checked values replace those that were passed, and an error names the wrong field."""
    ring = Ring(np.int64(3), Fraction(1, 2))  # type: ignore[arg-type]
    assert (type(ring.size), type(ring.share)) == (int, float)
    assert ring == Ring(3, 0.5)
    with pytest.raises(ConfigError, match=r"Ring\(share=2\)"):
        Ring(1, 2)


def test_folders_are_distinct(tmp_path: Path) -> None:
    """Two names of one folder are refused, through a link or a detour."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    require_distinct("The list", [tmp_path, tmp_path / "a", tmp_path / "b"])
    for other in (tmp_path / "link", tmp_path / "b" / ".." / "a", tmp_path / "a"):
        with pytest.raises(ConfigError, match=rf"The list names the folder '{other}' twice\. Name each folder once\."):
            require_distinct("The list", [tmp_path / "a", tmp_path / "b", other])
