"""Tests emulated SmartSSDs in processes of their own: sanitizers, the process's end, another XRT."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_TEST_LIMIT, PROCESS_LIMIT
from tests.native.builds import ROOT
from tests.xrt.builds import EmulatorBuild, build
from tests.xrt.cards import EmulatedCards

pytestmark = [RunIf(xrt=True), pytest.mark.timeout(BUILD_TEST_LIMIT)]


@pytest.mark.parametrize(("fault", "times"), long_but([("hang", 1)], [("hang", 1), ("hang", 10), ("stall", 1)]))
def test_process_ends_with_what_was_given_up(
    emulated_cards: EmulatedCards, tmp_path: Path, fault: str, times: int
) -> None:
    """A process exits before XRT's static destructors, which would abort it, and its output is not lost."""
    arguments = [str(emulated_cards.build.xclbin), str(tmp_path), fault]
    for _ in range(times):  # without the precaution about half of the runs fail
        completed = _run([sys.executable, "-m", "tests.xrt.hung_exit", *arguments], emulated_cards.build, {})
        assert (completed.returncode, completed.stdout) == (0, "left hanging\n"), completed.stderr


@pytest.mark.long
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_stress(sanitizers: str) -> None:
    """Sanitizers find no bad access, leak, undefined behaviour or race in the driver; cards differ in address."""
    made = build(sanitizers)
    command = [str(made.stress), str(made.probe_xclbin), "50"]
    settings = {"SMART_INFINITY_CARD_COUNT": "2"}
    completed = _run(command, made, settings)
    if "unexpected memory mapping" in completed.stderr:
        # Older thread sanitizers know fewer layouts of the address space than kernels choose from.
        completed = _run(["setarch", "-R", *command], made, settings)
    assert completed.returncode == 0, completed.stderr
    shell = "xilinx_u2_gen3x4_xdma_gc_base_2"
    assert sorted(completed.stdout.splitlines()) == sorted([f"{shell} 0000:10:00.1", f"{shell} 0000:11:00.1"] * 2)


def _run(command: list[str], made: EmulatorBuild, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | made.environment | {"PYTHONPATH": str(ROOT)} | settings
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT)
