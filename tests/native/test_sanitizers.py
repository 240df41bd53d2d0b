"""The native core under the compilers' sanitizers in random scenarios (stress*.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import BUILD_TEST_LIMIT
from tests.native.builds import ROOT, run
from tests.xrt.builds import locked

pytestmark = [pytest.mark.timeout(BUILD_TEST_LIMIT), pytest.mark.long]

PROGRAMS = ("stress", "stress_card", "stress_formats", "stress_gradients", "stress_queue", "stress_watch")
NUM_SEEDS = "200"


def built(sanitizers: str) -> Path:
    """Return the folder of the programs, in which only what changed is compiled again."""
    folder = ROOT / "build" / f"stress_{sanitizers.replace(',', '_')}"
    # A unity build is faster, since nearly all of the time goes into headers.
    options = ["CMAKE_BUILD_TYPE=Debug", "CMAKE_UNITY_BUILD=ON", f"SMART_INFINITY_SANITIZE={sanitizers}"]
    switches = ["SMART_INFINITY_BUILD_STRESS=ON", "SMART_INFINITY_BUILD_MODULE=OFF"]
    with locked(folder):
        run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *(f"-D{option}" for option in options + switches))
        run("cmake", "--build", folder, "--target", *PROGRAMS, "--parallel", "4")
    return folder


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_stress(tmp_path: Path, sanitizers: str) -> None:
    """There is no bad access, leak, undefined behaviour or race, and every bit equals that of a plain loop."""
    build = built(sanitizers)
    for program in PROGRAMS:
        completed = run_with_threads(build / program, tmp_path, "0", NUM_SEEDS, build / "libfake_cuda.so")
        told = f"{program}\n{completed.stdout}\n{completed.stderr}"
        assert (completed.returncode, completed.stdout) == (0, f"{NUM_SEEDS} scenarios\n"), told


def run_with_threads(*command: str | Path) -> subprocess.CompletedProcess[str]:
    completed = run(*command, expect_success=False)
    if "unexpected memory mapping" in completed.stderr:
        # Older thread sanitizers know fewer address-space layouts than kernels use.
        return run("setarch", "-R", *command, expect_success=False)
    return completed
