"""Each planted violation of the include direction between the core's rooms is found, and no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT

ROOT = Path(__file__).parents[2]
CORE = "lightning_smartinfinity/native/src"

VIOLATIONS = {
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


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "include_contracts.py", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_LIMIT)


@pytest.fixture
def copy_of_sources(tmp_path: Path) -> Path:
    for folder in (CORE, "hls"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/native_core.md", tmp_path / "docs")
    return tmp_path


def test_every_violation_is_found(copy_of_sources: Path) -> None:
    """Each include or file that breaks a rule is named; the checkout breaks no rule."""
    completed = check(ROOT)
    assert (completed.returncode, completed.stderr) == (0, "")
    for file, line, _ in VIOLATIONS.values():
        path = copy_of_sources / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as source:
            source.write(f"\n{line}\n")
    completed = check(copy_of_sources)
    assert completed.returncode == 1
    found = completed.stderr.splitlines()
    assert [
        name
        for name, (file, _, problem) in VIOLATIONS.items()
        if not any(file in line and problem in line for line in found)
    ] == []
    assert len(found) == len(VIOLATIONS)
