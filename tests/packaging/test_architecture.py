"""The pages for contributors are short, and name what is there."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_smartinfinity"
PAGES = ("architecture.md", "bytes_on_storage.md", "gpu.md", "native_core.md")
GENERATED = {"kernels/update_rules.hpp", "native/_core.pyi"}
NOT_OURS = {"CMakeLists.txt", "ModelCheckpoint"}
MOST_WORDS = 2500
MOST_WORDS_BEFORE_THE_STEP = 300


def quoted(pattern: str) -> list[str]:
    """Return what the pages quote in this form, outside of blocks of code."""
    texts = [(ROOT / "docs" / page).read_text() for page in PAGES]
    plain = [re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
    names = {name for text in plain for name in re.findall(r"`([^`\n]+)`", text)}
    return sorted(name for name in names - NOT_OURS if re.fullmatch(pattern, name))


@cache
def words_by_source() -> list[tuple[set[str], set[str]]]:
    """Return for each source of the package the classes and constants that it defines, and all of its words."""
    sources = [path.read_text() for path in PACKAGE.rglob("*") if path.suffix in {".py", ".hpp", ".cpp"}]
    definition = r"\b(?:class|struct) (\w+)|\b(\w+)(?:\[\])?(?::.*)? = "
    return [
        ({name for names in re.findall(definition, source) for name in names}, set(re.findall(r"\w+", source)))
        for source in sources
    ]


def test_the_walk_is_short_and_begins_with_a_step() -> None:
    """The page has at most so many words, and the first line of a step is among the first of them."""
    page = (ROOT / "docs/architecture.md").read_text()
    assert len(page.split()) <= MOST_WORDS
    before, step, _ = page.partition("\n1. ")
    assert step and len(before.split()) < MOST_WORDS_BEFORE_THE_STEP


def test_files_and_folders_exist() -> None:
    """Each file and folder is in the package, in a room of it or of the core, or in the repository."""
    places = (PACKAGE, ROOT, PACKAGE / "native/src", *PACKAGE.glob("*/"))
    paths = set(quoted(r"[a-z]\w*/(?:[\w.]+/)*(?:\w+\.\w+)?")) - GENERATED
    assert len(paths) > 50
    assert [path for path in sorted(paths) if not any((place / path).exists() for place in places)] == []


def test_classes_and_their_members_exist() -> None:
    """Each class is defined, in a file that has the method or attribute named with it."""
    owned = defaultdict[str, set[str]](set)
    for defined, words in words_by_source():
        for name in defined:
            owned[name] |= words
    names = [name.partition(".") for name in quoted(r"_?[A-Z]\w*[a-z]\w*(?:\.\w+)?|k[A-Z]\w+")]
    assert len(names) > 50
    assert [name for name in names if not owned[name[0]].issuperset({name[0], name[2]} - {""})] == []


def test_functions_exist() -> None:
    """Each function, setting and attribute that is named alone occurs in the package."""
    known = set[str]().union(*(words for _, words in words_by_source()))
    assert [name for name in quoted(r"[a-z]+(?:_[a-z]+)+") if name not in known] == []
