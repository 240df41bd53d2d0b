"""Rules define the values that a setting may have, and sizes as people write them. Errors name the remedy."""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity import ConfigError, TransferConfig
from lightning_smartinfinity.settings.rules import (
    FLAG,
    STRATEGY,
    Rule,
    among,
    between,
    check,
    in_bytes,
    instance,
    num_bytes,
    number,
    one_of,
    optional,
    positive,
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
ANYTHING: tuple[Any, ...] = (None, "", "auto", "2", True, False, 0, 1, 2, 3, 4, 8, 9, -1, 0.0, 0.5, 2.0, 4.5, math.nan)
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
        ("between", [2, 3, 4, 8, np.int64(2)]),
        ("at least", [2, 3, 4, 8, 9, 10**400, np.int64(2)]),
        ("number", [1, 2, 3, 4, 0.5, 2.0, Fraction(5, 2), np.int64(2), np.float32(0.5)]),
        ("positive", [1, 2, 3, 4, 0.5, 2.0, Fraction(5, 2), np.int64(2), np.float32(0.5)]),
        ("among", [2, 4, np.int64(2)]),
        ("words", ["auto"]),
        ("instance", [timedelta(1)]),
        ("flag", [True, False]),
        ("none", [None, 2, 3, 4, 8, np.int64(2)]),
        ("word", ["auto", 2, 3, 4, 8, np.int64(2)]),
    ],
)
def test_what_is_allowed(name: str, expected: list[Any]) -> None:
    """Each rule holds for the values in its range only.

    A bool is no number, and an array is no word. No value makes the rule raise.
    """
    assert [repr(value) for value in allowed(name)] == [repr(value) for value in expected]


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
        pytest.param(
            "Ring",
            10**5000,  # more digits than Python writes
            between(2, 8),
            "Ring(size=<too many digits to show>) is out of range. Pass an int from 2 to 8.",
            id="too many digits",
        ),
    ],
)
def test_error(owner: str, value: object, rule: Rule, message: str) -> None:
    """An error names the owner, the value and the remedy."""
    with pytest.raises(ConfigError) as caught:
        check(owner, "size", value, rule)
    assert str(caught.value) == message


def test_folders_are_distinct(tmp_path: Path) -> None:
    """Two names of one folder are refused, through a link or a detour."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    require_distinct("The list", [tmp_path, tmp_path / "a", tmp_path / "b"])
    for other in (tmp_path / "link", tmp_path / "b" / ".." / "a", tmp_path / "a"):
        with pytest.raises(ConfigError, match=rf"The list names the folder '{other}' twice\. Name each folder once\."):
            require_distinct("The list", [tmp_path / "a", tmp_path / "b", other])


SIZES = {
    "512": 512,
    "8GB": 8_000_000_000,
    "8gb": 8_000_000_000,
    "8 G": 8_000_000_000,
    "8GiB": 8_589_934_592,
    " 8 gi ": 8_589_934_592,
    "1.5kB": 1_500,
    "1.5KiB": 1_536,
    "0.1MB": 100_000,
    "2TB": 2_000_000_000_000,
    "2TiB": 2_199_023_255_552,
}
NO_SIZES: tuple[Any, ...] = ("", "GB", "8XB", "-8GB", "+8GB", "8e9", "8,5GB", "nan", "inf", "8GB 1", "٨GB", "9" * 21)
NO_SIZES += (None, True, 8.0, [8], b"8GB")


@pytest.mark.parametrize("text", SIZES)
def test_a_size_with_its_unit(text: str) -> None:
    """Units are powers of 1000, and with an i powers of 1024. The setting is kept as bytes."""
    assert in_bytes(text) == SIZES[text]
    assert TransferConfig(dram_cache_bytes=text).dram_cache_bytes == SIZES[text]


@pytest.mark.parametrize("value", NO_SIZES)
def test_what_is_no_size(value: object) -> None:
    """The rule refuses it, and the remedy shows how a size is written."""
    assert in_bytes(value) is None
    assert not num_bytes(0).holds(value)
    if value is not None:  # which keeps the default of tasklet_bytes
        with pytest.raises(ConfigError, match=r"TransferConfig\(tasklet_bytes=.* is no size .*'64MB' .*'64MiB'"):
            TransferConfig(tasklet_bytes=value)  # type: ignore[arg-type]


def test_both_ends_of_the_range_are_allowed() -> None:
    """A size has a range, however it is written."""
    rule = num_bytes(1000, 2000)
    assert [value for value in (999, 1000, "1kB", "1KiB", "2kB", 2000, "2KiB", "1TB") if rule.holds(value)] == [
        1000,
        "1kB",
        "1KiB",
        "2kB",
        2000,
    ]
    assert type(rule.kept(np.int64(1000))) is int
    # Any size from 64 KiB on is taken, whether or not it is a multiple of something.
    for size, expected in (("4MB", 4_000_000), ("4MiB", 4_194_304), (None, None)):
        config = TransferConfig(tasklet_bytes=size)
        assert (config.tasklet_bytes, config.buffer_bytes) == (expected, expected)
    with pytest.raises(ConfigError, match=r"tasklet_bytes='4kB'.* from 65536 to"):
        TransferConfig(tasklet_bytes="4kB")
