"""A test that never ends fails. In CI, so does a run if a test that could run is skipped, or leaves something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT, LIMIT, PROCESS_LIMIT

TESTS = Path(__file__).parents[1]

PASSES = "def test_passes(): pass"
SKIPS = "import pytest\n@pytest.mark.skip(reason='did not feel like it')\ndef test_skipped(): pass"
SKIPS_WHILE_RUNNING = "import pytest\ndef test_skipped(): pytest.skip('did not feel like it')"
SKIPS_A_MODULE = "import pytest\npytest.importorskip('no_such_module_anywhere')\ndef test_skipped(): pass"
LACKS_CUDA = """
import pytest
from tests.helpers.runif import RunIf
@RunIf(cuda_devices=1000)
def test_on_many_devices(): pass
def test_passes(): pass
"""
LEAVES_MEMORY = """
import os
def test_leaves(): open(f'{shared}/deepspeed_allreduce_buffer_{os.getuid()}__1_0', 'w').close()
"""
LEAVES_A_FILE = "def test_leaves(): open('left.txt', 'w').close()"
PROPERTY = """
from hypothesis import given, strategies
@given(strategies.integers())
def test_holds(number): assert number * 0 == 0
"""
EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail\ndef test_known_bug(): assert False"


def run(folder: Path, source: str, *, ci: str) -> tuple[int, str]:
    """Run pytest with this project's conftest on one test file and return its exit status and output."""
    shutil.copytree(TESTS / "helpers", folder / "tests" / "helpers", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "shm").mkdir()
    conftest = (TESTS / "conftest.py").read_text().replace("/dev/shm", str(folder / "shm"))
    (folder / "tests" / "conftest.py").write_text(conftest)
    (folder / "tests" / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = -ra --import-mode=importlib\n")
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    return completed.returncode, completed.stdout


@pytest.mark.parametrize(
    ("source", "ci", "status", "says"),
    [
        pytest.param(SKIPS_WHILE_RUNNING, "true", 1, ["should have run here", "test_it.py"], id="while running"),
        pytest.param(SKIPS_A_MODULE, "true", 5, ["should have run here", "test_it.py"], id="module"),
        pytest.param(LACKS_CUDA, "true", 0, ["no CUDA device"], id="no device"),
        pytest.param(SKIPS, "", 0, ["did not feel like it"], id="outside of CI"),
        pytest.param(EXPECTED_FAILURE, "true", 0, ["1 xfailed"], id="expected failure"),
        pytest.param(LEAVES_MEMORY, "true", 1, ["deepspeed_allreduce_buffer_"], id="memory"),
        pytest.param(LEAVES_A_FILE, "true", 1, ["left.txt"], id="file"),
        pytest.param(PROPERTY, "true", 0, ["1 passed"], id="database of hypothesis"),
    ],
)
def test_what_fails_in_ci(source: str, ci: str, status: int, says: list[str], tmp_path: Path) -> None:
    """Skips without a good reason fail in CI, as does what tests leave, and the output names it."""
    ended, output = run(tmp_path, source.replace("{shared}", str(tmp_path / "shm")), ci=ci)
    assert ended == status, output
    assert [words for words in says if words not in output] == []


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


def test_the_limits_of_this_project() -> None:
    """Waits in tests end before the test fails, and the test fails before its process is ended."""
    limits = dict(
        line.split(" = ") for line in (ROOT / "pyproject.toml").read_text().splitlines() if "timeout = " in line
    )
    assert LIMIT < PROCESS_LIMIT < float(limits["timeout"]) < float(limits["faulthandler_timeout"])
    assert PROCESS_LIMIT < BUILD_LIMIT < BUILD_TEST_LIMIT
