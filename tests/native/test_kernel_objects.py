"""Sources compiled for newer instruction sets must not leak symbols into the rest of the library."""

from __future__ import annotations

import re

import pytest

from tests.helpers.native_testing import InstructionSet, crc32c_widths, supported_instruction_sets
from tests.native.builds import ROOT, run

NAMES = {InstructionSet.SCALAR: "scalar", InstructionSet.AVX2: "avx2", InstructionSet.AVX512: "avx512"}


def global_symbols(name: str) -> list[list[str]]:
    """Return the type and name of each global symbol of a source, from the object that the package was linked from."""
    objects = (ROOT / "build").glob(f"cp*/CMakeFiles/*/**/{name}.cpp.o")
    newest = max(objects, key=lambda path: path.stat().st_mtime)
    return [line[17:].split(maxsplit=1) for line in run("nm", "-C", "-g", newest).stdout.splitlines()]


@pytest.mark.parametrize(
    ("source", "kinds", "name"),
    [
        *(
            (f"kernels_{NAMES[choice]}", "DR", r"smart_infinity::k\w+Kernels")
            for choice in supported_instruction_sets()
        ),
        *((f"crc32c_{width}", "T", f"smart_infinity::extend_crc32c_{width}") for width in crc32c_widths()[1:]),
    ],
)
def test_only_one_symbol_is_visible(source: str, kinds: str, name: str) -> None:
    """Only the table of kernels or the checksum is visible, so the linker cannot choose code that a CPU cannot run."""
    [[kind, symbol]] = global_symbols(source)
    assert kind in kinds and re.fullmatch(name, symbol.partition("(")[0])
