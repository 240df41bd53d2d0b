"""Runs the attacks and prints their table: ``python -m tests.reliability.report``.

Tests say what they attacked by the fixture ``attack``, whichever folder they are in. With ``--write`` the rows go into
the table of docs/reliability.md, in place of those of the same files. The attacks take hours, so several runs, each of
some of the files, can make one table. With ``--short`` the attacks are repeated as often as in ``make test``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.attacks import PROPERTY

_REPOSITORY = Path(__file__).parents[2]
_PAGE = _REPOSITORY / "docs" / "reliability.md"
_HEADER = ["| attack | tries | outcome | test | commit |", "|---|---|---|---|---|"]


class Row(NamedTuple):
    """One line of the table.

    Args:
        file: The test's file, below tests/.
        seconds: How long the attack went on, if it was made for some time; else 0.
    """

    attack: str
    tries: int
    outcome: str
    file: str
    seconds: float = 0.0


class Rows:
    """A plugin that runs tests of attacks only, and collects what they tell and which of them failed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if "attack" in getattr(item, "fixturenames", ())]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, test = report.nodeid.partition("::")
        file = path.removeprefix("tests/")
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            name = test.partition("[")[0].removeprefix("test_").replace("_", " ")
            self.rows.append(Row(name, 0, f"did not run: {reason.removeprefix('Skipped: ')}", file))
        elif report.when == "call" or report.failed:  # a set-up that fails is an attack that was not held
            told = [value for name, value in report.user_properties if name == PROPERTY]
            for attack, tries, outcome, seconds in told or [[report.nodeid, 1, "", 0.0]] * report.failed:
                self.rows.append(Row(attack, tries, "**FAILED**" if report.failed else outcome, file, seconds))


def table_of(rows: Iterable[Row], commit: str) -> str:
    """Return the table in Markdown. Tests of one file with the same attack and outcome share a row.

    Args:
        rows: The rows.
        commit: The version that was attacked.
    """
    joined: dict[tuple[str, str, str], tuple[int, float]] = {}
    for row in sorted(rows, key=lambda row: (row.file, row.attack)):
        key = (row.attack, row.outcome, row.file)
        tries, seconds = joined.get(key, (0, 0.0))
        joined[key] = (tries + row.tries, seconds + row.seconds)
    lines = []
    for (attack, outcome, file), (tries, seconds) in joined.items():
        timed = f"{attack}, {seconds:.0f} s" if seconds else attack
        lines.append(f"| {timed} | {tries} | {outcome} | `{file}` | {commit} |")
    return "\n".join([*_HEADER, *lines])


def page_with(table: str, page: str) -> str:
    """Return a page whose table of attacks, which it must have, has the rows of another one, too.

    They replace the rows of the same files of tests.
    """
    before, header, behind = page.partition("\n".join(_HEADER))
    assert header, "the page has no table of attacks"
    known, end, rest = behind.partition("\n\n")
    new = table.splitlines()[len(_HEADER) :]
    files = set(map(_file_of, new))
    rows = new + [row for row in known.split("\n") if row and _file_of(row) not in files]
    return "\n".join([before + header, *sorted(rows, key=_file_of)]) + end + rest


def _file_of(row: str) -> str:
    return row.split(" | ")[-2]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    return subprocess.run(command, cwd=_REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


def files_with_attacks() -> list[str]:
    """Return the files whose tests use the fixture ``attack``."""
    files = sorted((_REPOSITORY / "tests").rglob("test_*.py"))
    return [str(file.relative_to(_REPOSITORY)) for file in files if "attack: Attack" in file.read_text()]


def main() -> int:
    """Run the attacks, print their table, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="repeat attacks as often as `make test` does")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/reliability.md")
    parser.add_argument("options", nargs="*", help="further options for pytest")
    arguments = parser.parse_args()
    limits = [] if arguments.short else ["--long", "-o", "timeout=3600", "-o", "faulthandler_timeout=3630"]
    named = any(option.startswith("tests/") for option in arguments.options)
    tests = [*([] if named else files_with_attacks()), *limits, *arguments.options]
    plugin = Rows()
    code = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    table = table_of(plugin.rows, _commit())
    print(f"\n{table}")
    if arguments.write:
        _PAGE.write_text(page_with(table, _PAGE.read_text()))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
