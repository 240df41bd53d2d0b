"""The page on adding an optimizer lists the files that RMSprop, its example, needs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "examples", "hls", "lightning_smartinfinity", "tools")
SUFFIXES = (".cpp", ".hpp", ".inl", ".py", ".txt")


def test_the_page_lists_the_files_that_name_its_example() -> None:
    """A new file that names an optimizer must be added to the page, or must derive what it needs."""
    page = (ROOT / "docs/adding_an_optimizer.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [file for file in ROOT.iterdir() if file.is_file() and file.suffix in (".txt", ".toml")]
    files += [ROOT / "Makefile", ROOT / "hls/Makefile"]
    naming = [file for file in files if "rmsprop" in f"{file.name} {file.read_text()}".lower()]
    assert sorted(listed) == sorted(str(file.relative_to(ROOT)) for file in naming)
    assert len(listed) <= 12
