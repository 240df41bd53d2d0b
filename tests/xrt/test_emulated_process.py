"""Tests emulated SmartSSDs in processes of their own: sanitizers, the process's end, another XRT."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_TEST_LIMIT, PROCESS_LIMIT
from tests.native.builds import ROOT, run
from tests.xrt.builds import EmulatorBuild, build
from tests.xrt.cards import EmulatedCards

pytestmark = [RunIf(xrt=True), pytest.mark.timeout(BUILD_TEST_LIMIT)]

HANG = """
from tests.xrt.api import Device, State
from tests.xrt.probe import Probe
import sys, pathlib
run = Probe(Device(1, pathlib.Path(sys.argv[1]))).run()
assert run.wait(20) is State.TIMEOUT
print("left hanging")
"""


def test_process_ends_with_a_run_that_hangs(emulated_cards: EmulatedCards) -> None:
    """A process exits while a run hangs; the environment can set the number of cards and their faults, too."""
    settings = {"SMART_INFINITY_CARD_COUNT": "2", "SMART_INFINITY_CARD_FAULTS": "0:sync:0;1:hang:0"}
    command = [sys.executable, "-c", HANG, str(emulated_cards.build.probe_xclbin)]
    completed = _run(command, emulated_cards.build, settings)
    assert (completed.returncode, completed.stdout) == (0, "left hanging\n"), completed.stderr


@pytest.mark.parametrize(
    ("fault", "times"), long_but([("hang", 1)], [("hang", 1), ("hang", 10), ("stall", 1), ("p2p", 1)])
)
def test_process_ends_with_what_was_given_up(
    emulated_cards: EmulatedCards, tmp_path: Path, fault: str, times: int
) -> None:
    """A process exits before XRT's static destructors, which would abort it, and its output is not lost."""
    arguments = [str(emulated_cards.build.xclbin), str(tmp_path), fault]
    for _ in range(times):  # without the precaution about half of the runs fail
        completed = _run([sys.executable, "-m", "tests.xrt.hung_exit", *arguments], emulated_cards.build, {})
        assert (completed.returncode, completed.stdout) == (0, "left hanging\n"), completed.stderr


def test_build_leaves_alone_what_other_processes_read(emulated_cards: EmulatedCards) -> None:
    """A build does not rewrite current files, because other processes read them without the lock."""
    made = emulated_cards.build
    files = [made.xclbin, made.probe_xclbin, made.ini, made.driver, made.kernels]
    before = [file.stat().st_mtime_ns for file in files]
    build()
    assert [file.stat().st_mtime_ns for file in files] == before


CRASH = """
import ctypes, faulthandler, pathlib, sys
from tests.xrt.api import Device, State
from tests.xrt.probe import BEATS, Probe
probe = Probe(Device(0, pathlib.Path(sys.argv[1])))
faulthandler.enable()
assert probe.run(last=BEATS + 1).wait() is State.ERROR
ctypes.string_at(1)
"""


def test_segmentation_fault_of_others_ends_the_process(emulated_cards: EmulatedCards) -> None:
    """Guards pass a segmentation fault of others on to the handler before them."""
    command = [sys.executable, "-c", CRASH, str(emulated_cards.build.probe_xclbin)]
    completed = _run(command, emulated_cards.build, {})
    assert completed.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in completed.stderr


def test_another_xrt_is_refused(emulated_cards: EmulatedCards, tmp_path: Path) -> None:
    """If a function is missing from the table to be changed, the process ends before it calls any."""
    other = tmp_path / "libxrt_noop.so.2"
    run("g++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", other, "-Wl,-soname,libxrt_noop.so.2")
    load = f"import ctypes; ctypes.CDLL({str(emulated_cards.build.driver)!r})"
    completed = _run([sys.executable, "-c", load], emulated_cards.build, {"LD_LIBRARY_PATH": str(tmp_path)})
    assert completed.returncode < 0
    assert "it works with XRT 2.13 only" in completed.stderr


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
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT, preexec_fn=_leave_no_core
    )


def _leave_no_core() -> None:
    """Write no core file: some of these processes end by a signal, and the card's memory is large."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
