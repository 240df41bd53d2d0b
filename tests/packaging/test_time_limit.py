"""A test that never ends fails, and the other tests run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT, LIMIT, PROCESS_LIMIT

ROOT = Path(__file__).parents[2]

# Settings that are tested themselves.
FIXED = {
    "smartssd/test_cards.py": ["2147483"],
    "training/test_watching.py": ["timedelta(seconds=1)"],  # for a machine that never comes
    "typing/user_code.py": ["10"],
}

IN_PYTHON = """
import threading, time
def wait_for_ever(): time.sleep(1000)
def test_hangs():
    threading.Thread(target=wait_for_ever, daemon=True).start()
    time.sleep(1000)
def test_passes(): pass
"""
# This holds the interpreter's lock, so that no Python signal handler runs.
IN_NATIVE_CODE = """
import ctypes
def test_hangs():
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)
def test_passes(): pass
"""


SLOW = """
import time, pytest
@pytest.mark.timeout(100)
def test_builds(): time.sleep(1)
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        pytest.param(IN_PYTHON, ["Timeout (>1.0s)", "wait_for_ever"], id="in Python"),
        pytest.param(
            IN_NATIVE_CODE, ["crashed while running", "in test_hangs"], id="in native code", marks=pytest.mark.long
        ),
    ],
)
def test_a_test_that_hangs_fails_alone(tmp_path: Path, source: str, told: list[str]) -> None:
    """The output shows where the test hung, also in a process of xdist, and the next test passes."""
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    limits = ["--numprocesses=1", "-otimeout=1", "-ofaulthandler_timeout=3", "-opythonpath="]
    done = subprocess.run(
        [*command, *limits, tmp_path], cwd=tmp_path, capture_output=True, text=True, timeout=PROCESS_LIMIT
    )
    output = done.stdout + done.stderr
    assert "1 failed, 1 passed" in output, output
    assert [words for words in told if words not in output] == [], output


def test_a_limit_of_its_own(tmp_path: Path) -> None:
    """A test whose mark sets a longer limit outlives the others' limits, also that of the process."""
    (tmp_path / "test_it.py").write_text(SLOW)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    limits = ["-p", "tests.conftest", "-otimeout=0.1", "-ofaulthandler_timeout=0.1"]
    done = subprocess.run([*command, *limits, tmp_path], capture_output=True, text=True, timeout=PROCESS_LIMIT)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_limits_of_this_project() -> None:
    """Waits in tests end before the test fails, and the test fails before its process is ended."""
    limits = dict(
        line.split(" = ") for line in (ROOT / "pyproject.toml").read_text().splitlines() if "timeout = " in line
    )
    assert LIMIT < PROCESS_LIMIT < float(limits["timeout"]) < float(limits["faulthandler_timeout"])
    assert PROCESS_LIMIT < BUILD_LIMIT < BUILD_TEST_LIMIT


def fixed_limits(source: str) -> list[str]:
    """Return the code of each argument and default called ``timeout`` that is a number other than 0."""
    found = list[ast.AST]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.arguments):
            names = [argument.arg for argument in node.posonlyargs + node.args]
            pairs = [*zip(reversed(names), reversed(node.defaults), strict=False)]
            pairs += [(argument.arg, value) for argument, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        else:
            continue
        found += [value for name, value in pairs if name == "timeout" and _numbers(value)]
    return [ast.unparse(value) for value in found]


def _numbers(value: ast.AST | None) -> bool:
    """Tell whether an expression holds a number and no name of a constant."""
    parts = list(ast.walk(value)) if value is not None else []
    numbers = [part for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, int | float)]
    return bool(numbers) and not any(isinstance(part, ast.Name) and part.id.isupper() for part in parts)


@pytest.mark.parametrize(
    "source",
    [
        "run(command, timeout=60)",
        "run(command, timeout=2 * 60)",
        "fit(timeout=timedelta(seconds=60))",
        "def launch(run, timeout: float = 600): ...",
        "def launch(*runs, timeout=600): ...",
    ],
)
def test_a_fixed_limit_is_found(source: str) -> None:
    """The number is found in a call and in a default."""
    assert len(fixed_limits(source)) == 1


def test_no_test_has_a_fixed_limit() -> None:
    """A test waits for processes and threads with the limits of ``tests/helpers/waiting.py``."""
    tests = ROOT / "tests"
    found = {str(path.relative_to(tests)): fixed_limits(path.read_text()) for path in tests.rglob("*.py")}
    assert {name: values for name, values in found.items() if values} == FIXED
