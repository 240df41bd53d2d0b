"""Sources compiled for newer instruction sets must not leak symbols into the rest of the library."""

from __future__ import annotations

import pytest

from tests.helpers.native_testing import InstructionSet, crc32c_widths, supported_instruction_sets
from tests.native.builds import ROOT, run

NAMES = {InstructionSet.SCALAR: "scalar", InstructionSet.AVX2: "avx2", InstructionSet.AVX512: "avx512"}


def global_symbols(name: str) -> list[list[str]]:
    """Return the type and name of each global symbol of a source, from the object that the package was linked from."""
    objects = (ROOT / "build").glob(f"cp*/CMakeFiles/*/**/{name}.cpp.o")
    newest = max(objects, key=lambda path: path.stat().st_mtime)
    return [line[17:].split(maxsplit=1) for line in run("nm", "-C", "-g", newest).stdout.splitlines()]


@pytest.mark.parametrize("choice", supported_instruction_sets(), ids=lambda choice: choice.name.lower())
def test_only_the_table_is_visible(choice: InstructionSet) -> None:
    """Only the table of kernels is visible, so the linker cannot choose code that a CPU cannot run."""
    [[kind, name]] = global_symbols(f"kernels_{NAMES[choice]}")
    assert kind in ("D", "R") and name.startswith("smart_infinity::k") and name.endswith("Kernels")


@pytest.mark.parametrize("width", crc32c_widths()[1:])
def test_only_the_checksum_is_visible(width: int) -> None:
    """Only the checksum function is visible."""
    symbols = global_symbols(f"crc32c_{width}")
    assert [(kind, name.partition("(")[0]) for kind, name in symbols] == [
        ("T", f"smart_infinity::extend_crc32c_{width}")
    ]
