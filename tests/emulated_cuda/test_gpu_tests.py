"""The tests that want a GPU pass on the emulated one, on which the bits of the host are expected elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda.build import build, environment
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT
from tests.native.builds import ROOT

# A file of tests takes as long as a build.
pytestmark = [RunIf(torch_without_cuda=True), pytest.mark.timeout(BUILD_TEST_LIMIT)]

FILES = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
QUICK = ["test_activation_hooks.py", "test_activation_pool.py", "test_transfer.py"]


@pytest.mark.parametrize("file", long_but(QUICK, FILES))
def test_they_pass(file: str, tmp_path: Path) -> None:
    """None fails and none is skipped: there are two devices."""
    assert_they_pass(f"tests/gpu/{file}", tmp_path)


def assert_they_pass(file: str, folder: Path, *, seed: int = 1) -> None:
    """Run the tests of a file in a process that has the device.

    Args:
        file: Path of the file.
        folder: Folder for temporary files.
        seed: Seed of the delays.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={folder / 'inner'}"]
    command.append("--timeout=120")  # below ours, so that the test which hangs is named
    done = subprocess.run(
        [*command, file],
        cwd=ROOT,
        env=environment(build(), seed=seed),
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT,
    )
    assert done.returncode == 0 and "SKIPPED" not in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
