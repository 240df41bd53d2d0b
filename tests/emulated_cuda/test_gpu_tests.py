"""The tests that want a GPU pass on the emulated one, on which the bits of the host are expected elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda.build import build, environment
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT
from tests.native.builds import ROOT

# A file of tests takes as long as a build.
pytestmark = [RunIf(torch_without_cuda=True), pytest.mark.timeout(BUILD_TEST_LIMIT)]

FILES = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
USUAL = "test_activation_pool.py"


def test_the_usual_ones_pass(tmp_path: Path) -> None:
    """Activations come and go beside a device that computes, and nothing is lost if calls, copies and waits fail."""
    # Those of failures leave streams that have failed.
    assert_they_pass(tmp_path, f"tests/gpu/{USUAL}", "tests/emulated_cuda/activation_faults.py")


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_all_pass(file: str, tmp_path: Path) -> None:
    """None fails and none is skipped: there are two devices."""
    assert_they_pass(tmp_path, f"tests/gpu/{file}")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
def test_delays(tmp_path: Path, seed: int) -> None:
    """Whatever is late, gradients are those of autograd alone."""
    assert_they_pass(tmp_path, "tests/gpu/test_activations.py", seed=seed)


def assert_they_pass(folder: Path, *files: str, seed: int = 1) -> None:
    """Run the tests of files in one process that has the device.

    Args:
        folder: Folder for temporary files.
        *files: Paths of the files.
        seed: Seed of the delays.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={folder / 'inner'}"]
    command.append("--timeout=120")  # below ours, so that the test which hangs is named
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env=environment(build(), seed=seed),
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT,
    )
    assert done.returncode == 0 and "SKIPPED" not in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
