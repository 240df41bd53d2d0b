"""Enters every Python process of the tests, copied into their environment as ``mutants_hook``.

``MUTANT_FILE`` names a module's file and the changed text to run in its place. ``MUTANT_TESTS`` names a file with the
tests to run, and ``MUTANT_LOG`` the file to which their results are appended. ``MUTANT_LINES`` names a file with the
lines of mutants: ``MUTANT_TRACE`` then receives which test reaches which mutant. pytest leaves the test's name in the
environment, which processes that the test starts inherit.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests that are asked for, in their order."""
    if path := os.environ.get("MUTANT_TESTS"):
        with open(path) as file:
            places = {name: place for place, name in enumerate(json.load(file))}
        items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test starts: a mutant may end the process."""
    _note(test=nodeid, outcome="started", seconds=0.0)


def pytest_runtest_logreport(report: Any) -> None:
    """Note how set-up, call or teardown of a test ended."""
    _note(test=report.nodeid, outcome=report.outcome, seconds=report.duration)


def _note(**what: object) -> None:
    if "MUTANT_LOG" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["MUTANT_LOG"], "a") as file:
            file.write(json.dumps(what) + "\n")


def reached(number: int) -> None:
    """Note that the current test reaches a mutant."""
    test = _OUTER or os.environ.get("PYTEST_CURRENT_TEST", "")
    if test and _LAST.get(number) != test:
        _LAST[number] = test
        file = _OPEN(_TRACE, os.O_WRONLY | os.O_APPEND)
        _WRITE(file, f"{number} {test}\n".encode(errors="replace"))
        _CLOSE(file)


class _Noting(ast.NodeTransformer):
    """Inserts a call of :func:`reached` before each statement on the line of a mutant."""

    def __init__(self, numbers: dict[int, list[int]]) -> None:
        self._numbers = numbers

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return node
        calls = [f"__import__('mutants_hook').reached({number})" for number in self._numbers.get(node.lineno, ())]
        inserted = ast.parse("\n".join(calls)).body
        for new in (part for statement in inserted for part in ast.walk(statement)):
            if hasattr(new, "lineno"):
                new.lineno = new.end_lineno = node.lineno
        return [*inserted, node]


def _change_code(changed: Callable[[str], str | ast.AST | None]) -> None:
    """Compile what is returned for a module's file in place of the file's text, or the text itself for None."""
    get_code = SourceFileLoader.get_code

    def code(self: SourceFileLoader, fullname: str) -> Any:
        new = changed(os.path.realpath(self.path))
        return get_code(self, fullname) if new is None else compile(new, self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = code  # type: ignore[method-assign, assignment]


def _one_mutant(original: str, changed: str) -> None:
    _change_code(lambda path: Path(changed).read_text() if path == original else None)


def _all_lines(lines: dict[str, list[tuple[int, int]]]) -> None:
    def noting(path: str) -> ast.AST | None:
        if path not in lines:
            return None
        numbers: dict[int, list[int]] = {}
        for line, number in lines[path]:
            numbers.setdefault(line, []).append(number)
        return _Noting(numbers).visit(ast.parse(Path(path).read_bytes()))  # type: ignore[no-any-return]

    _change_code(noting)


# A test may replace these.
_OPEN, _WRITE, _CLOSE = os.open, os.write, os.close
_TRACE = os.environ.get("MUTANT_TRACE", "")
_LAST: dict[int, str] = {}
# A test that runs pytest counts for the tests within it.
_OUTER = os.environ.get("PYTEST_CURRENT_TEST", "") if "pytest" in sys.orig_argv else ""
if "MUTANT_FILE" in os.environ:
    _one_mutant(*os.environ["MUTANT_FILE"].split(os.pathsep))
if "MUTANT_LINES" in os.environ:
    _all_lines(json.loads(Path(os.environ["MUTANT_LINES"]).read_text()))
