"""The native core under the compilers' sanitizers in random scenarios (stress*.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import BUILD_TEST_LIMIT
from tests.native.builds import configure, run

pytestmark = pytest.mark.timeout(BUILD_TEST_LIMIT)

NUM_SEEDS = 60


@pytest.mark.parametrize("sanitizers", [pytest.param("address,undefined", marks=pytest.mark.long), "thread"])
def test_stress(tmp_path: Path, sanitizers: str) -> None:
    """There is no bad access, leak, undefined behaviour or race, and every bit equals that of a plain loop."""
    build = tmp_path / "build"
    options = {"SMART_INFINITY_BUILD_STRESS": "ON", "SMART_INFINITY_SANITIZE": sanitizers}
    # A unity build is faster, since nearly all of the time goes into headers.
    configure(build, CMAKE_BUILD_TYPE="Debug", CMAKE_UNITY_BUILD="ON", **options)
    programs = ["stress", "stress_gradients", "stress_card", "stress_queue", "stress_watch"]
    if sanitizers != "thread":
        programs.append("stress_formats")  # which use no threads
    run("cmake", "--build", build, "--target", *programs, "--parallel", "4")
    for completed in (
        stress(build / "stress", tmp_path, build / "libfake_cuda.so"),
        stress(build / "stress_gradients", tmp_path),
        stress(build / "stress_card", tmp_path),
        stress(build / "stress_queue", tmp_path),
    ):
        assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
        assert completed.stdout == f"{NUM_SEEDS} scenarios\n"
    watched = run_with_threads(build / "stress_watch", "0", str(NUM_SEEDS))
    assert (watched.returncode, watched.stdout) == (0, f"{NUM_SEEDS} scenarios\n"), watched.stderr
    if "stress_formats" in programs:
        assert run(build / "stress_formats", "0", str(NUM_SEEDS)).stdout == f"{NUM_SEEDS} scenarios\n"


def stress(program: Path, folder: Path, *others: Path) -> subprocess.CompletedProcess[str]:
    return run_with_threads(program, folder, "0", str(NUM_SEEDS), *others)


def run_with_threads(*command: str | Path) -> subprocess.CompletedProcess[str]:
    completed = run(*command, expect_success=False)
    if "unexpected memory mapping" in completed.stderr:
        # Older thread sanitizers know fewer address-space layouts than kernels use.
        return run("setarch", "-R", *command, expect_success=False)
    return completed
