"""Documents refer to existing files and make targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

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


def test_hooks_before_a_commit_fetch_nothing() -> None:
    """Each hook runs one of the Makefile's targets with installed tools."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    assert [hook["entry"] for hook in repository["hooks"]] == ["make lint", "make types", "make contracts"]


def test_files_that_documents_name_exist() -> None:
    """Each path of a test or a benchmark in the documents is that of a file."""
    text = "\n".join(document.read_text() for document in DOCUMENTS if document.name != "CHANGELOG.md")
    named = set(re.findall(r"\b((?:benchmarks|tests)/[\w/]+\.py)", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
