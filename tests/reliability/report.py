"""Runs the attacks and prints their table: ``python -m tests.reliability.report``.

Tests say what they attacked by the fixture ``attack``, whichever folder they are in. The table goes into
docs/reliability.md. With ``--short`` the attacks are repeated as often as in ``make test``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.attacks import PROPERTY

__all__ = ["Row", "rows_of", "table_of"]

_REPOSITORY = Path(__file__).parents[2]


class Row(NamedTuple):
    """One line of the table."""

    attack: str
    tries: int
    outcome: str
    test: str

    @property
    def file(self) -> str:
        """The test's file, below tests/."""
        return self.test.partition("::")[0].removeprefix("tests/")


class _Rows:
    """A plugin that runs tests of attacks only, and collects what they tell and which of them failed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if "attack" in getattr(item, "fixturenames", ())]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:  # a set-up that fails is an attack that was not held
            return
        told = [value for name, value in report.user_properties if name == PROPERTY]
        if report.failed and not told:
            told = [[report.nodeid, 1, ""]]
        for attack, tries, outcome in told:
            self.rows.append(Row(attack, tries, "**FAILED**" if report.failed else outcome, report.nodeid))


def rows_of(options: Sequence[str]) -> tuple[list[Row], int]:
    """Run tests of attacks, and return what they told, and pytest's exit code.

    Args:
        options: Paths and options for pytest.
    """
    plugin = _Rows()
    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *options], plugins=[plugin])
    return plugin.rows, int(code)


def table_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown. Tests of one file with the same attack and outcome share a row."""
    joined: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row.attack, row.outcome, row.file)
        joined[key] = joined.get(key, 0) + row.tries
    lines = [f"| {attack} | {tries} | {outcome} | `{file}` |" for (attack, outcome, file), tries in joined.items()]
    return "\n".join(["| attack | tries | outcome | test |", "|---|---|---|---|", *lines])


def files_with_attacks() -> list[str]:
    """Return the files whose tests use the fixture ``attack``."""
    files = sorted((_REPOSITORY / "tests").rglob("test_*.py"))
    return [str(file.relative_to(_REPOSITORY)) for file in files if "attack: Attack" in file.read_text()]


def main() -> int:
    """Run the attacks, print their table, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="repeat attacks as often as `make test` does")
    parser.add_argument("options", nargs="*", help="further options for pytest")
    arguments = parser.parse_args()
    limits = [] if arguments.short else ["--long", "-o", "timeout=3600", "-o", "faulthandler_timeout=3630"]
    rows, code = rows_of([*files_with_attacks(), *limits, *arguments.options])
    print(f"\n{table_of(rows)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
