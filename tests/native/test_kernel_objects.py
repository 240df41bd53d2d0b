"""Translation units for newer instruction sets must keep to themselves."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from lightning_smartinfinity.native import InstructionSet, supported_instruction_sets
from tests.native.builds import configure, run

NAMES = {InstructionSet.SCALAR: "scalar", InstructionSet.AVX2: "avx2", InstructionSet.AVX512: "avx512"}


@pytest.fixture(scope="module", params=supported_instruction_sets(), ids=lambda choice: choice.name.lower())
def symbols(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Type and name of each global symbol of the object file, compiled as the package compiles it."""
    build = tmp_path_factory.mktemp("build")
    configure(build, CMAKE_BUILD_TYPE="Release", CMAKE_EXPORT_COMPILE_COMMANDS="ON")
    name = f"kernels_{NAMES[request.param]}"
    commands = json.loads((build / "compile_commands.json").read_text())
    command = next(entry["command"] for entry in commands if Path(entry["file"]).stem == name)
    arguments = shlex.split(command)
    arguments[arguments.index("-o") + 1] = str(build / "object.o")
    subprocess.run(arguments, cwd=build, check=True)
    return [line.split()[-2:] for line in run("nm", "-C", "-g", build / "object.o").stdout.splitlines()]


def test_only_the_table_is_visible(symbols: list[list[str]]) -> None:
    """No weak symbol, which the linker might choose for a CPU that cannot run it, and no call out of the loops."""
    assert len(symbols) == 1
    (kind, name) = symbols[0]
    assert kind in ("D", "R") and name.startswith("smart_infinity::k") and name.endswith("Kernels")
