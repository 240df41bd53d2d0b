"""A test that never ends fails, and the other tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT, LIMIT, PROCESS_LIMIT

ROOT = Path(__file__).parents[2]

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
