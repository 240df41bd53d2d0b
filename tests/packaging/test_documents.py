"""Documents refer to existing files and make targets. Pages for contributors are short, and name what is there."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "benchmarks", "hls", "examples", "tests")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_project_lead_to_files(document: Path) -> None:
    """No relative link is broken."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    relative = [link for link in links if "://" not in link]
    assert [link for link in relative if not (document.parent / link).exists()] == []


def headings(document: Path) -> set[str]:
    """Return the anchors of a document's headings, made as on GitHub."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings(document: Path) -> None:
    """Each link to a part of a document names a heading that is there."""
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    targets = [(document.parent / name if name else document, anchor) for name, anchor in links]
    assert [anchor for path, anchor in targets if path.suffix == ".md" and anchor not in headings(path)] == []


def test_make_targets_named_in_documents_exist() -> None:
    """Every ``make something`` in a document is a target."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= targets


def test_files_that_documents_name_exist() -> None:
    """Each path of a test or a benchmark in the documents is that of a file."""
    text = "\n".join(document.read_text() for document in DOCUMENTS if document.name != "CHANGELOG.md")
    named = set(re.findall(r"\b((?:benchmarks|tests)/[\w/]+\.py)", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


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
