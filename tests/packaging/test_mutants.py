"""tools/mutants chooses, finds again, runs and compares mutants of a small package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.house import git
from tools.mutants.__main__ import main
from tools.mutants.sites import Index, python_sites

PACKAGE = '''\
"""A docstring."""
from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsewhere import nothing


def bigger(a: int, b: int) -> int:
    """Return b if it is bigger, and 0 if not."""
    if a < b:
        return b
    return 0


def unseen(items: list[int]) -> None:
    items.append(4)


def unreached() -> int:
    return 5
'''
TESTS = """\
import os, subprocess, sys
from made import bigger

def test_bigger():
    assert (bigger(1, 2), bigger(2, 1), bigger(3, 3)) == (2, 0, 0)

def test_unseen():
    subprocess.run([sys.executable, "-m", "pytest", "inner.py"], check=True)

def test_fails():
    assert bigger(1, 2) == 1
"""
INNER = """\
from made import unseen

def test_inner():
    unseen([])
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with a package and its tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of the time
    root = tmp_path / "tree"
    (root / "made").mkdir(parents=True)
    git(tmp_path, "init", "--quiet", "tree")
    (root / "made/__init__.py").write_text(PACKAGE)
    (root / "test_made.py").write_text(TESTS)
    (root / "inner.py").write_text(INNER)
    commit(root)
    return root


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "Change it")


def call(root: Path, command: str, *options: str, **files: str) -> None:
    """Run a command on the tree, with files beside it."""
    named = [part for name, value in files.items() for part in (f"--{name}", str(root.parent / value))]
    assert main([command, *named, "--tree", str(root), "--package", "made", *options]) == 0


def choose(root: Path, out: str, seed: int = 1, count: int = 100) -> list[dict[str, str]]:
    call(root, "choose", "--seed", str(seed), "--python", str(count), mutants=out)
    chosen: list[dict[str, str]] = json.loads((root.parent / out).read_text())
    return chosen


def outcomes(path: Path) -> dict[str, str]:
    return {told["what"]: told["outcome"] for told in map(json.loads, path.read_text().splitlines())}


def test_mutants_of_a_package(tree: Path) -> None:
    """Mutants are caught, survive or are reached by no test, and are found again after the code has moved."""
    scratch = ("--scratch", str(tree.parent / "scratch"))
    chosen = choose(tree, "mutants")
    assert {one["function"] for one in chosen} == {"bigger", "unseen", "unreached"}
    assert choose(tree, "again", count=2) == choose(tree, "again", count=2) != choose(tree, "again", seed=2, count=2)
    assert len({one["line"] for one in chosen}) == len(chosen) == 5

    (tree / "made/room").mkdir()
    (tree / "made/room/moved.py").write_text(PACKAGE.replace("def bigger", "\n\ndef bigger"))
    (tree / "made/__init__.py").write_text("from made.room.moved import bigger, unreached, unseen\n")
    commit(tree)
    call(tree, "map", *scratch, "-n", "1", map="map", mutants="mutants")
    call(tree, "run", *scratch, map="map", mutants="mutants", out="results")
    told = outcomes(tree.parent / "results")
    assert [what for what, outcome in told.items() if outcome == "survived"] == [
        f"made/__init__.py: unseen: {one['change']}" for one in chosen if one["function"] == "unseen"
    ]
    assert sorted(told.values()) == ["caught", "caught", "caught", "survived", "unreached"]
    assert git(tree, "status", "--porcelain") == []

    moved = tree / "made/room/moved.py"
    moved.write_text(PACKAGE.replace("a < b", "a < b + 0"))
    with pytest.raises(SystemExit, match="Commit what has changed in made"):
        call(tree, "run", *scratch, map="map", mutants="mutants", out="later")
    found = [Index(python_sites(tree, moved)).find(one) for one in chosen]
    assert [one["line"] for one, site in zip(chosen, found, strict=True) if site is None] == [11]
    commit(tree)
    with pytest.raises(SystemExit, match="Make a new map"):
        call(tree, "run", *scratch, map="map", mutants="mutants", out="later")


@pytest.mark.parametrize(
    ("after", "status"), [("caught", 0), ("timeout", 0), ("gone", 0), ("survived", 1), ("unreached", 1)]
)
def test_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], after: str, status: int) -> None:
    """A mutant that was caught before and is there, but not caught, makes the status 1."""
    for name, outcome in (("before", "caught"), ("after", after)):
        results = [{"id": "a", "outcome": outcome, "test": "t", "what": "<"}, {"id": "b", "outcome": "survived"}]
        (tmp_path / name).write_text("\n".join(map(json.dumps, results)))
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == status
    assert capsys.readouterr().out.startswith("caught:" if after in ("caught", "timeout") else f"a {after}, was caught")
