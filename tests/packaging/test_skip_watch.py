"""In CI a run fails if a test is skipped that the machine could run, or leaves memory or files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    ("source", "ci", "status", "says"),
    [
        pytest.param(SKIPS, "true", 1, ["should have run here", "test_it.py"], id="marked", marks=pytest.mark.long),
        pytest.param(SKIPS_WHILE_RUNNING, "true", 1, ["should have run here", "test_it.py"], id="while running"),
        pytest.param(SKIPS_A_MODULE, "true", 5, ["should have run here", "test_it.py"], id="module"),
        pytest.param(LACKS_CUDA, "true", 0, ["no CUDA device"], id="no device"),
        pytest.param(SKIPS, "", 0, ["did not feel like it"], id="outside of CI"),
        pytest.param(EXPECTED_FAILURE, "true", 0, ["1 xfailed"], id="expected failure"),
        pytest.param(LEAVES_MEMORY, "true", 1, ["deepspeed_allreduce_buffer_"], id="memory"),
        pytest.param(LEAVES_A_FILE, "true", 1, ["left.txt"], id="file"),
        pytest.param(LEAVES_A_FILE, "", 0, ["1 passed"], id="file outside of CI"),
        pytest.param(PROPERTY, "true", 0, ["1 passed"], id="database of hypothesis"),
        pytest.param("", "true", 5, ["no tests ran"], id="no tests"),
    ],
)
def test_what_fails_in_ci(source: str, ci: str, status: int, says: list[str], tmp_path: Path) -> None:
    """Skips without a good reason fail in CI, as does what tests leave, and the output names it."""
    ended, output = run(tmp_path, source.replace("{shared}", str(tmp_path / "shm")), ci=ci)
    assert ended == status, output
    assert [words for words in says if words not in output] == []
