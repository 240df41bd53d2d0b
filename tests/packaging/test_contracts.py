"""Planted violations of imports and includes are found; a test that never ends, or leaves something, fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import run_module
from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT, LIMIT, PROCESS_LIMIT
from tools.seams import page_of

ROOT = Path(__file__).parents[2]

VIOLATIONS = {
    "storage/_planted.py": ("import torch", "native and storage know no torch"),
    "native/_planted.py": ("import torch", "native and storage know no torch"),
    "pipeline/state/_planted.py": ("import deepspeed.runtime", "Only zero3 imports deepspeed"),
    "pipeline/step.py": ("import lightning_smartinfinity.devices.smartssd", "SmartSSDs are a guest wing"),
    "_planted.py": ("", "Imports go one way"),  # a new room without a place in the layers
    "devices/_planted.py": ("import lightning_smartinfinity.pipeline", "Imports go one way"),
    "settings/transfer.py": ("import lightning_smartinfinity.storage", "Imports go one way"),
    "storage/io/_planted.py": ("import lightning_smartinfinity.storage.folders", "The rooms of storage import one way"),
    "pipeline/_planted.py": ("", "The rooms of pipeline import one way"),
    "zero3/_planted.py": ("", "The rooms of zero3 import one way"),  # a new module without a place in the layers
    "zero3/parameters/_planted.py": (
        "import lightning_smartinfinity.zero3.optimizer",
        "The rooms of zero3 import one way",
    ),
    "zero3/checkpoints/formats/_planted.py": (
        "import lightning_smartinfinity.zero3.checkpoints.save",
        "The rooms of zero3.checkpoints import one way",
    ),
    "zero3/optimizer/_planted.py": ("import lightning.pytorch", "Only the integrations import lightning"),
    "integrations/trainer/callbacks.py": ("import pytorch_lightning", "Only the lightning namespace"),
    "integrations/fabric/_planted.py": (
        "import lightning_smartinfinity.integrations.trainer",
        "No integration imports another",
    ),
    "pipeline/layout/partition_layout.py": ("import os", "The layout is pure arithmetic"),
    "_autoload.py": ("import lightning_smartinfinity.settings", "Discovery imports nothing of the package"),
}


# An editable installation would find the package before the linter's folder.
LINT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
sys.path.insert(0, "")
from importlinter.cli import lint_imports_command
lint_imports_command(["--no-cache", "--no-logo"])
"""


def broken_contracts(folder: Path) -> list[str]:
    """Return the contracts that import-linter finds broken in a copy of the package."""
    completed = subprocess.run(
        [sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True, timeout=PROCESS_LIMIT
    )
    broken = [line.split(" BROKEN")[0] for line in completed.stdout.splitlines() if " BROKEN" in line]
    assert bool(broken) == bool(completed.returncode), completed.stdout + completed.stderr
    return broken


def test_every_violation_is_found(tmp_path: Path) -> None:
    """One forbidden import for each contract, and for each room, breaks it; a copy of the package breaks none."""
    package, left_out = tmp_path / "lightning_smartinfinity", shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / package.name, package, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert broken_contracts(tmp_path) == []
    for file, (line, _) in VIOLATIONS.items():
        with (package / file).open("a") as source:
            source.write(f"\n{line}\n")
    assert set(broken_contracts(tmp_path)) >= {contract for _, contract in VIOLATIONS.values()}


CORE = "lightning_smartinfinity/native/src"

WRONG_INCLUDES = {
    "upward": (f"{CORE}/base/process.hpp", '#include "cuda/cuda_device.hpp"', "is above base/"),
    "a neighbour without its room": (f"{CORE}/io/transfer.hpp", '#include "io_engine.hpp"', "is no path below src/"),
    "relative": (f"{CORE}/io/transfer.hpp", '#include "../base/failure.hpp"', "is no path below src/"),
    "in angle brackets": (f"{CORE}/base/process.hpp", "#include <cuda/cuda_device.hpp>", "is above base/"),
    "relative in angle brackets": (
        f"{CORE}/io/transfer.hpp",
        "#include <../src/base/buffer.hpp>",
        "no path below src/",
    ),
    "out of the core": (
        f"{CORE}/io/transfer.hpp",
        '#include "../../../../hls/emulator/card.hpp"',
        "no path below src/",
    ),
    "testing in the product": (f"{CORE}/module/module.cpp", '#include "testing/hold.hpp"', "and tests only"),
    "a file outside the rooms": (f"{CORE}/planted.hpp", "", "lies outside the rooms"),
    "a new room": (f"{CORE}/planted/planted.hpp", "", "lies outside the rooms"),
    "emulator": ("hls/emulator/card.hpp", '  #  include "io/transfer.hpp"', "not in base/"),
    "emulator, relative": ("hls/emulator/card.hpp", f'#include "../../{CORE}/io/transfer.hpp"', "not in base/"),
    "emulator, in angle brackets": ("hls/emulator/card.hpp", "#include <io/transfer.hpp>", "not in base/"),
    "emulator, generated": ("hls/emulator/card.hpp", '#include "kernels/update_rules.hpp"', "not in base/"),
    "emulator, another suffix": ("hls/emulator/planted.inl", '#include "io/transfer.hpp"', "not in base/"),
    "kernels": ("hls/kernels/sgd_update.hpp", '#include "base/buffer.hpp"', "which only hls/emulator includes"),
    "headers of kernels": ("hls/include/run.hpp", "#include <base/buffer.hpp>", "which only hls/emulator includes"),
    "simulation": ("hls/sim/csim.cpp", '#include "io/transfer.hpp"', "which only hls/emulator includes"),
    "a room without a row": ("docs/native_core.md", "| `native/src/planted/` | a room |", "lists the rooms base, "),
}


def check_includes(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "include_contracts.py", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_LIMIT)


def test_every_wrong_include_is_found(tmp_path: Path) -> None:
    """Each include or file that breaks a rule is named; the checkout breaks no rule."""
    completed = check_includes(ROOT)
    assert (completed.returncode, completed.stderr) == (0, "")
    for folder in (CORE, "hls"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/native_core.md", tmp_path / "docs")
    for file, line, _ in WRONG_INCLUDES.values():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as source:
            source.write(f"\n{line}\n")
    completed = check_includes(tmp_path)
    assert completed.returncode == 1
    found = completed.stderr.splitlines()
    assert [
        name
        for name, (file, _, problem) in WRONG_INCLUDES.items()
        if not any(file in line and problem in line for line in found)
    ] == []
    assert len(found) == len(WRONG_INCLUDES)


def test_a_private_name_needs_a_contract_test(tmp_path: Path) -> None:
    """The page says what the test's docstring and mark say, and which module uses the name."""
    package, tests = tmp_path / "lightning_smartinfinity/room", tmp_path / "tests/zero3"
    package.mkdir(parents=True)
    tests.mkdir(parents=True)
    (package / "module.py").write_text("import torch\n\ntorch._planted()\n")
    assert page_of(tmp_path)[1] == ["_planted of room/module.py needs a test in tests/zero3/test_contract_*.py"]
    test = '"""Planted."""\n\n\ndef test_it():\n    """Torch has _planted."""\n'
    (tests / "test_contract.py").write_text(test)
    assert page_of(tmp_path)[1] == ["tests/zero3/test_contract.py: test_it needs pytest.mark.seam with its purpose"]
    (tests / "test_contract.py").write_text(test.replace("def", '@pytest.mark.seam("a purpose")\ndef'))
    page, problems = page_of(tmp_path)
    assert (
        "| Torch has `_planted`. | a purpose | `room/module.py` | `zero3/test_contract.py::test_it` |" in page
        and problems == []
    )


# ---- settings of pytest: a test that never ends fails; in CI a skip or what is left fails a run


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
    assert (
        LIMIT < PROCESS_LIMIT < float(limits["timeout"]) < float(limits["faulthandler_timeout"])
        and PROCESS_LIMIT < BUILD_LIMIT < BUILD_TEST_LIMIT
    )


# ---- forked processes


WORKER = "tests.helpers.reporting_worker"


def test_ranks_are_like_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the expected environment, its own random numbers, its output, and a normal interpreter exit."""
    monkeypatch.setenv("SOMETHING", "set since the server started")
    done = run_module(WORKER, tmp_path, "well", ranks=2)
    assert (done.returncode, done.stderr) == (0, "") and sorted(done.stdout.splitlines()) == [
        "rank 0 says so",
        "rank 1 says so",
    ]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, of_rank in enumerate(seen):
        ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
        told = {name: of_rank["environment"].pop(name) for name in (*ours, "MASTER_ADDR", "MASTER_PORT")}
        assert (
            ours.items() <= told.items()
            and of_rank["environment"] == fresh_environment()
            and (of_rank["main"], of_rank["lightning's rank"]) == (WORKER, rank)
            and (tmp_path / f"ended-{rank}").exists()
        )
    for drawn in ("numpy", "torch", "random"):
        assert seen[0][drawn] != seen[1][drawn], drawn


@pytest.mark.parametrize(("how", "status"), [("badly", 1), ("never", -signal.SIGKILL)])
def test_a_rank_that_fails_ends_the_others(how: str, status: int, tmp_path: Path) -> None:
    """The status is that of the failing rank, whose traceback is printed."""
    done = run_module(WORKER, tmp_path, how, ranks=2)
    assert (
        done.returncode == status
        and ("RuntimeError: told to" in done.stderr) == (how == "badly")
        and not (tmp_path / "ended-0").exists()
    )
