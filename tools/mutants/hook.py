"""Enters every Python process of the tests, copied into their environment as ``mutants_hook``.

``MUTANT_FILE`` names a module's file and the changed text to run in its place. ``MUTANT_TESTS`` names a file with the
tests to run, ``MUTANT_LOG`` one that is told of each. As a plugin of coverage, the module notes which test runs a line:
pytest leaves the test's name in the environment, which processes that the test starts inherit.
"""

from __future__ import annotations

import json
import os
from importlib.machinery import SourceFileLoader
from typing import Any


def coverage_init(registry: Any, _: Any) -> None:
    """Let coverage ask for the current test."""
    from coverage import CoveragePlugin

    class CurrentTest(CoveragePlugin):
        def dynamic_context(self, frame: Any) -> str | None:
            return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0] or None

    registry.add_dynamic_context(CurrentTest())


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


def _run_changed(original: str, changed: str) -> None:
    get_code = SourceFileLoader.get_code

    def code(self: SourceFileLoader, fullname: str) -> Any:
        if os.path.realpath(self.path) != original:
            return get_code(self, fullname)
        with open(changed, "rb") as file:
            return compile(file.read(), self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = code  # type: ignore[method-assign, assignment]


if "MUTANT_FILE" in os.environ:
    _run_changed(*os.environ["MUTANT_FILE"].split(os.pathsep))
