"""Planted violations of imports, of includes, and private names without a contract test, are found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT
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


@pytest.fixture
def copy_of_package(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "lightning_smartinfinity",
        tmp_path / "lightning_smartinfinity",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


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
    lines = completed.stdout.splitlines()
    broken = [line.split(" BROKEN")[0] for line in lines if " BROKEN" in line]
    assert bool(broken) == bool(completed.returncode), completed.stdout + completed.stderr
    return broken


def test_every_violation_is_found(copy_of_package: Path) -> None:
    """One forbidden import for each contract, and for each room, breaks it; the package breaks none."""
    assert broken_contracts(copy_of_package) == []
    for file, (line, _) in VIOLATIONS.items():
        with (copy_of_package / "lightning_smartinfinity" / file).open("a") as source:
            source.write(f"\n{line}\n")
    assert set(broken_contracts(copy_of_package)) >= {contract for _, contract in VIOLATIONS.values()}


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


@pytest.fixture
def copy_of_sources(tmp_path: Path) -> Path:
    for folder in (CORE, "hls"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/native_core.md", tmp_path / "docs")
    return tmp_path


def test_every_wrong_include_is_found(copy_of_sources: Path) -> None:
    """Each include or file that breaks a rule is named; the checkout breaks no rule."""
    completed = check_includes(ROOT)
    assert (completed.returncode, completed.stderr) == (0, "")
    for file, line, _ in WRONG_INCLUDES.values():
        path = copy_of_sources / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as source:
            source.write(f"\n{line}\n")
    completed = check_includes(copy_of_sources)
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
    assert "| Torch has `_planted`. | a purpose | `room/module.py` | `zero3/test_contract.py::test_it` |" in page
    assert problems == []
