"""The native core under the compilers' sanitizers in random scenarios (stress*.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import BUILD_TEST_LIMIT
from tests.native.builds import configure, run

pytestmark = pytest.mark.timeout(BUILD_TEST_LIMIT)

PROGRAMS = ("stress", "stress_gradients", "stress_queue", "stress_watch")
ALL_PROGRAMS = (*PROGRAMS, "stress_card", "stress_formats")


@pytest.mark.parametrize(
    ("sanitizers", "programs", "num_seeds"),
    [
        pytest.param("thread", PROGRAMS, 20, id="thread", marks=pytest.mark.long),
        # There are no threads in stress_formats, but its scenarios take no time.
        pytest.param("thread", ALL_PROGRAMS, 200, id="thread, all", marks=pytest.mark.long),
        pytest.param("address,undefined", ALL_PROGRAMS, 200, id="address, all", marks=pytest.mark.long),
    ],
)
def test_stress(tmp_path: Path, sanitizers: str, programs: tuple[str, ...], num_seeds: int) -> None:
    """There is no bad access, leak, undefined behaviour or race, and every bit equals that of a plain loop."""
    build = tmp_path / "build"
    options = {"SMART_INFINITY_BUILD_STRESS": "ON", "SMART_INFINITY_SANITIZE": sanitizers}
    # A unity build is faster, since nearly all of the time goes into headers.
    configure(build, CMAKE_BUILD_TYPE="Debug", CMAKE_UNITY_BUILD="ON", **options)
    run("cmake", "--build", build, "--target", *programs, "--parallel", "4")
    for program in programs:
        folder = [] if program in ("stress_watch", "stress_formats") else [tmp_path]
        library = [build / "libfake_cuda.so"] if program == "stress" else []
        completed = run_with_threads(build / program, *folder, "0", str(num_seeds), *library)
        told = f"{program}\n{completed.stdout}\n{completed.stderr}"
        assert (completed.returncode, completed.stdout) == (0, f"{num_seeds} scenarios\n"), told


def run_with_threads(*command: str | Path) -> subprocess.CompletedProcess[str]:
    completed = run(*command, expect_success=False)
    if "unexpected memory mapping" in completed.stderr:
        # Older thread sanitizers know fewer address-space layouts than kernels use.
        return run("setarch", "-R", *command, expect_success=False)
    return completed
