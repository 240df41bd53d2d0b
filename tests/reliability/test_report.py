"""The table of attacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import PROPERTY
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.waiting import PROCESS_LIMIT
from tests.reliability.report import Row, Rows, page_with, table_of

REPOSITORY = Path(__file__).parents[2]


def report(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.reliability.report", "--short", "--", *options],
        cwd=REPOSITORY,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )


@pytest.mark.long
def test_a_report_of_one_attack() -> None:
    """Only tests of attacks run, and their tries are added."""
    done = report("-k", "flipped_bit_is_found and not wherever or full_disk")
    assert done.returncode == 0, done.stdout
    row = (
        "| bit flip in state on storage | 4 | StorageCorruptError with path and offset | `pipeline/test_failures.py` |"
    )
    assert row in done.stdout.splitlines()
    assert "4 passed" in done.stdout


@pytest.mark.parametrize("told", [[["a", 3, "whole", 0.0]], []], ids=["said what it did", "failed before"])
def test_an_attack_that_is_not_held(told: list[list[Any]]) -> None:
    """A test that fails says so in the table, whatever it said before."""
    rows = Rows()
    properties: list[tuple[str, object]] = [(PROPERTY, values) for values in told]
    where: Any = {"nodeid": "tests/x.py::one", "location": ("", 0, ""), "keywords": {}, "longrepr": None}
    rows.pytest_runtest_logreport(pytest.TestReport(**where, outcome="failed", when="call", user_properties=properties))
    assert [(row.outcome, row.file) for row in rows.rows] == [("**FAILED**", "x.py")]


def test_the_table_of_a_page() -> None:
    """The rows of files that ran again are replaced; the others stay, in the order of files, and so does the text."""
    rows = [Row("a", 1, "**FAILED**", "tests/x.py::one"), Row("b", 2, "whole", "tests/y.py::two", 2.0)]
    again = Row("a", 3, "whole", "tests/x.py::one")
    page = page_with(table_of([again]), f"before\n\n{table_of(rows)}\n\nbehind\n")
    assert page == f"before\n\n{table_of([again, rows[1]])}\n\nbehind\n"
    assert page_with(table_of([]), page) == page
