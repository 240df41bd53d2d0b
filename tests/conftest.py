"""Settings for every test: it uses no network, is not skipped silently, and frees its memory and files."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.helpers.attacks import PROPERTY, Attack
from tests.helpers.offloaded import ASKED_FOR
from tests.helpers.processes import start_server
from tests.helpers.runif import is_allowed
from tests.helpers.streamed_state import stream_state

if TYPE_CHECKING:
    from tests.helpers.silent_disk import SilentDisk

# This precedes every import of a library that would look for files or versions on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# A busy machine takes as long as it takes: no test fails by the time of an example.
settings.register_profile("lenient", deadline=None)
settings.load_profile("lenient")
stream_state()
# Failing examples are kept for the next run, but not in the current folder.
set_hypothesis_home_dir(Path(__file__).parents[1] / "build/hypothesis")

_FORBIDDEN_SKIPS = pytest.StashKey[list[str]]()
_NUM_MODULES = pytest.StashKey[int]()
_LEFT_BEFORE = pytest.StashKey[set[Path]]()
_MANY_MODULES = 20  # a collection takes as long as the import of some
_CACHES = {"__pycache__", ".pytest_cache", "build"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run tests marked 'long', too, which take minutes")
    parser.addoption(
        "--fuzz-seconds", type=float, default=600.0, help="how long each long test by fuzzing goes on (default: 600)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FORBIDDEN_SKIPS] = []
    config.stash[_LEFT_BEFORE] = _left(config)
    gc.set_threshold(10_000, 20, 20)  # by default imports collect again and again
    config.pluginmanager.register(_SkipWatch(config.stash[_FORBIDDEN_SKIPS]))
    # As under `make`: each process of the tests would compile for seven seconds what it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if config.getoption("numprocesses", None):
        # Several workers share the cores, and two threads on one core would wait long for each other. The number must
        # be the same everywhere: sums of floats depend on it.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        start_server()  # one for all workers


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long tests unless requested; a deselected test is not reported as skipped."""
    if config.getoption("long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    _exclude_imports_from_garbage_collection(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After each test look for new imports."""
    result = yield
    _exclude_imports_from_garbage_collection(item.config)
    return result


def _exclude_imports_from_garbage_collection(config: pytest.Config) -> None:
    """Exclude all that is imported by now from garbage collection, if that is much more than before.

    Every fit collects, which would take a third of a small fit's time, and the first fit imports what the others only
    use. Objects that later tests make are still collected.
    """
    if len(sys.modules) > config.stash.get(_NUM_MODULES, 0) + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        config.stash[_NUM_MODULES] = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the process of a test with a limit of its own live for a minute longer than that limit."""
    if mark := item.get_closest_marker("timeout"):
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(mark.args[0] + 60, exit=True, file=stderr)


def pytest_runtest_teardown() -> None:
    """Take back what a test has set for the whole process: that it is to end, and the calls that messages name."""
    if core := sys.modules.get("lightning_smartinfinity.native._core"):
        core.take_back_ask_to_end()
    if calls := sys.modules.get("lightning_smartinfinity.settings.user_calls"):
        calls.advise(calls.CALLS_OF_TRAINER)


@pytest.fixture
def attack(request: pytest.FixtureRequest) -> Attack:
    """Return a function by which a test adds a row to the table of attacks."""

    def tell(attack: str, *, tries: int, outcome: str, seconds: float = 0.0) -> None:
        request.node.user_properties.append((PROPERTY, [attack, tries, outcome, seconds]))

    return tell


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SilentDisk]:
    """Return a disk whose calls the test can let hang. All of them answer at its end."""
    from tests.helpers.silent_disk import SilentDisk  # with much of the package, which not every run needs

    disk = SilentDisk(monkeypatch, tmp_path / "stat")
    yield disk
    disk.answer()


@pytest.fixture
def activations_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep activations in memory unless the test asks for storage, as it counts bytes that they would change."""
    monkeypatch.delenv(ASKED_FOR, raising=False)


class _SkipWatch:
    """A plugin that records every skip whose reason is not on the allow list, at collection and at run time."""

    def __init__(self, forbidden: list[str]) -> None:
        self._forbidden = forbidden

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if not is_allowed(reason):
                self._forbidden.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print what a failing test of a seam breaks. Let xdist send what tests write about paths that are not UTF-8."""
    report = yield
    if report.failed and isinstance(item, pytest.Function) and item.get_closest_marker("seam"):
        test = f"`{item.path.relative_to(Path(__file__).parent)}::{item.originalname}`"
        rows = (Path(__file__).parents[1] / "docs/seams.md").read_text().splitlines()
        report.sections.append(("what breaks (docs/seams.md)", "\n".join(row for row in rows if test in row)))
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    stash = session.config.stash
    wrong = stash[_FORBIDDEN_SKIPS] or _left(session.config) - stash[_LEFT_BEFORE]
    if wrong and _in_ci() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    forbidden = config.stash[_FORBIDDEN_SKIPS]
    if forbidden and _in_ci():
        terminalreporter.section("skipped, but should have run here (CI=true)", red=True)
        for line in forbidden:
            terminalreporter.line(line)
    left = _left(config) - config.stash[_LEFT_BEFORE]
    if left and _in_ci():
        terminalreporter.section("left by tests in shared memory or in the current folder (CI=true)", red=True)
        for path in sorted(left):
            terminalreporter.line(str(path))


def _left(config: pytest.Config) -> set[Path]:
    """Return what tests may have left: files in the current folder, and buffers of DeepSpeed's op for collectives.

    No process may use this op, whose buffers stay in shared memory.
    """
    here = {path for path in config.invocation_params.dir.iterdir() if path.name not in _CACHES}
    return here | set(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"))


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")
