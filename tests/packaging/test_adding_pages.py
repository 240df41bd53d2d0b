"""The pages on adding something list the files of the source tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("lightning_smartinfinity", "hls")
SOURCES = {".py", ".cpp", ".hpp", ".inl", ".pyi"}


def product_files(pattern: str) -> set[str]:
    """Return the product files in which a pattern occurs."""
    return {
        str(path.relative_to(ROOT))
        for folder in PRODUCT
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SOURCES and re.search(pattern, path.read_text())
    }


def test_a_state_format_touches_the_files_on_its_page() -> None:
    """The page lists every product file with the example's name, its codes or the kernel that rounds to them."""
    page = (ROOT / "docs" / "adding_a_state_format.md").read_text()
    listed = re.findall(r"`((?:lightning_smartinfinity|hls)/[\w/.]+)`", page)
    assert sorted(listed) == sorted(product_files(r"int8_remainder|kCodes|round_int8"))
