"""Builds native sources apart from the package, and runs code in new and in forked processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.waiting import BUILD_LIMIT, PROCESS_LIMIT

__all__ = ["ROOT", "assert_in_fork", "built_once", "in_fork", "is_refused", "locked", "run", "run_python"]

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, expect_success: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command. An error contains all of its output."""
    completed = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=BUILD_LIMIT)
    if expect_success:
        assert completed.returncode == 0, f"{command}\n{completed.stdout}\n{completed.stderr}"
    return completed


def run_python(code: str, *arguments: str | Path, status: int = 0) -> str:
    """Run code in a new interpreter in the checkout and return what it prints. It must print no error."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=fresh_environment(), capture_output=True, text=True, timeout=PROCESS_LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (status, ""), done
    return done.stdout


def in_fork(call: Callable[[], object]) -> int:
    """Call a function in a forked child, which never returns into pytest. Return its exit status, 1 after an error."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # a child that hangs then fails the test instead of blocking it
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def assert_in_fork(check: Callable[[], bool]) -> None:
    """Assert that something holds in a forked child."""
    assert in_fork(lambda: check() or os._exit(2)) == 0


def is_refused(use: Callable[[], object]) -> bool:
    """Return whether an object of the parent process refuses to be used in a forked child."""
    try:
        use()
    except RuntimeError as error:
        return "fork" in str(error)
    return False


def built_once(library: str, *sources: Path, options: tuple[str, ...] = ()) -> Path:
    """Return the shared library of the first source, which includes the others.

    It is compiled unless ``build/`` has it, of the same sources and options.
    """
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-pthread", str(sources[0]), *options]
    state = hashlib.sha256(repr(command).encode())
    for source in sources:
        state.update(source.read_bytes())
    built = ROOT / "build" / sources[0].parent.name / state.hexdigest()[:16] / library
    with locked(built.with_suffix(".lock")):
        if not built.exists():
            unfinished = built.with_suffix(".new")
            run(*command, "-o", unfinished)
            unfinished.rename(built)
    return built


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock a file against other processes that call this: tests in them may need the same build."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
