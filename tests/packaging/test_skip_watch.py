"""In CI a run fails if a test is skipped that the machine could run, or leaves memory or files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.long_cases import long_but
from tests.helpers.waiting import PROCESS_LIMIT

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
    "source",
    long_but([SKIPS_WHILE_RUNNING, SKIPS_A_MODULE], [SKIPS, SKIPS_WHILE_RUNNING, f"{PASSES}\n{SKIPS}", SKIPS_A_MODULE]),
    ids=["marked", "while running", "beside a passing one", "whole module"],
)
def test_skip_without_a_good_reason_fails_in_ci(source: str, tmp_path: Path) -> None:
    """However the test was skipped, the session fails and says which test and why."""
    status, output = run(tmp_path, source, ci="true")
    assert status != 0
    assert "should have run here" in output
    assert "test_it.py" in output


def test_skip_for_want_of_a_device_passes_in_ci(tmp_path: Path) -> None:
    """A missing CUDA device is a good reason, and the reason is printed."""
    status, output = run(tmp_path, LACKS_CUDA, ci="true")
    assert status == 0
    assert "no CUDA device" in output


def test_skip_outside_ci_only_prints(tmp_path: Path) -> None:
    """A developer may skip a test, and the reason is printed."""
    status, output = run(tmp_path, SKIPS, ci="")
    assert status == 0
    assert "did not feel like it" in output


def test_expected_failure_is_no_skip(tmp_path: Path) -> None:
    """An expected failure counts as a test that ran."""
    assert run(tmp_path, EXPECTED_FAILURE, ci="true")[0] == 0


@pytest.mark.parametrize(("ci", "expected"), [("true", 1), ("", 0)])
def test_memory_left_behind_fails_in_ci(ci: str, expected: int, tmp_path: Path) -> None:
    """The session names a buffer of DeepSpeed's op for collectives, which would stay in /dev/shm."""
    source = LEAVES_MEMORY.replace("{shared}", str(tmp_path / "shm"))
    status, output = run(tmp_path, source, ci=ci)
    assert status == expected
    assert (f"deepspeed_allreduce_buffer_{os.getuid()}__1_0" in output) == bool(expected)


@pytest.mark.parametrize(("ci", "expected"), [("true", 1), ("", 0)])
def test_a_file_left_in_the_current_folder_fails_in_ci(ci: str, expected: int, tmp_path: Path) -> None:
    """The session names the file. The database of hypothesis is elsewhere."""
    status, output = run(tmp_path, f"{LEAVES_A_FILE}\n{PROPERTY}", ci=ci)
    assert status == expected
    assert (f"{tmp_path / 'left.txt'}\n" in output) == bool(expected)
    assert not (tmp_path / ".hypothesis").exists()


def test_no_tests_at_all_fail(tmp_path: Path) -> None:
    """A session that collects no tests fails."""
    assert run(tmp_path, "", ci="true")[0] == 5
