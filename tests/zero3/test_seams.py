"""docs/seams.md is complete: every seam has a test, every contract test a seam, every private name a row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.zero3.seams import ROOT, read_seams

PACKAGE = ROOT / "lightning_smartinfinity"
LIBRARIES = ("deepspeed", "lightning", "torch", "transformers")
# Names that belong to no library: documented by Python, or our own under a computed name.
NOT_THEIRS = {"_current_frames", "_getframe", "_replace"}


def test_every_seam_names_one_test_that_exists() -> None:
    """The last cell of each row names a test that exists, and the files that would break exist, too."""
    seams, tests = read_seams(), set(_tests())
    assert len(seams) > 80
    assert [seam.test for seam in seams if seam.test not in tests] == []
    files = [file for seam in seams for file in re.findall(r"`([^`]+)`", seam.used_in)]
    assert files and [file for file in files if not (PACKAGE / file).is_file()] == []


def test_every_contract_test_is_on_the_page() -> None:
    """A contract test that no row names would fail without saying what breaks."""
    named = {seam.test for seam in read_seams()}
    assert [test for test in _tests("zero3/test_contract*.py") if test not in named] == []


def test_every_private_name_in_the_package_is_on_the_page() -> None:
    """Attributes and imports with an underscore that nothing in the package defines are others': they need a row."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    ours = {name for tree in trees for name in _defined(tree)}
    used = {name for tree in trees for name in _private_names(tree)} - ours - NOT_THEIRS
    assert len(used) > 30
    page = set(re.findall(r"\w+", " ".join(seam.theirs for seam in read_seams())))
    assert sorted(used - page) == [], "write a contract test, and its row in docs/seams.md"


def _tests(pattern: str = "**/test_*.py") -> Iterator[str]:
    folder = ROOT / "tests"
    for path in sorted(folder.glob(pattern)):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(folder)}::{node.name}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from filter(_is_private, names)


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Name):
                        yield part.id
                    elif (
                        isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                    ):
                        yield part.attr
