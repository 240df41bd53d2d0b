"""Sources compiled for newer instruction sets must not leak symbols into the rest of the library."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_testing import InstructionSet, crc32c_widths, supported_instruction_sets
from tests.helpers.waiting import PROCESS_LIMIT
from tests.native.builds import configure, run

NAMES = {InstructionSet.SCALAR: "scalar", InstructionSet.AVX2: "avx2", InstructionSet.AVX512: "avx512"}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder with the package's compile commands and the generated header."""
    folder = tmp_path_factory.mktemp("build")
    configure(folder, CMAKE_BUILD_TYPE="Release", CMAKE_EXPORT_COMPILE_COMMANDS="ON")
    run("cmake", "--build", folder, "--target", "generated/kernels/update_rules.hpp")
    return folder


def global_symbols(build: Path, name: str) -> list[list[str]]:
    """Return the type and name of each global symbol of a source, compiled as in the package."""
    commands = json.loads((build / "compile_commands.json").read_text())
    command = next(entry["command"] for entry in commands if Path(entry["file"]).stem == name)
    arguments = shlex.split(command)
    arguments[arguments.index("-o") + 1] = str(build / "object.o")
    subprocess.run(arguments, cwd=build, check=True, timeout=PROCESS_LIMIT)
    return [line[17:].split(maxsplit=1) for line in run("nm", "-C", "-g", build / "object.o").stdout.splitlines()]


@pytest.mark.parametrize("choice", supported_instruction_sets(), ids=lambda choice: choice.name.lower())
def test_only_the_table_is_visible(build: Path, choice: InstructionSet) -> None:
    """Only the table of kernels is visible, so the linker cannot choose code that a CPU cannot run."""
    [[kind, name]] = global_symbols(build, f"kernels_{NAMES[choice]}")
    assert kind in ("D", "R") and name.startswith("smart_infinity::k") and name.endswith("Kernels")


@pytest.mark.parametrize("width", crc32c_widths()[1:])
def test_only_the_checksum_is_visible(build: Path, width: int) -> None:
    """Only the checksum function is visible."""
    symbols = global_symbols(build, f"crc32c_{width}")
    assert [(kind, name.partition("(")[0]) for kind, name in symbols] == [
        ("T", f"smart_infinity::extend_crc32c_{width}")
    ]
