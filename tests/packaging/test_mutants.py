"""tools/mutants chooses, finds again, runs and compares mutants of a small package."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tools.house import git
from tools.mutants.__main__ import main
from tools.mutants.cpp import cpp_sites, refused, write_switches
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
from made import bigger, unseen

def test_bigger():
    assert (bigger(1, 2), bigger(2, 1), bigger(3, 3)) == (2, 0, 0)

def test_unseen():
    subprocess.run([sys.executable, "-c", "from made import unseen; unseen([])"], check=True)

def test_fails():
    assert bigger(1, 2) == 1
"""
CPP = """\
#include <cstdio>
#include <cstdlib>
// if (a < b) is no code here, and neither is "a < b" below.
constexpr int fixed(int a) {
    return a + 1;
}
class Counter {
 public:
    bool is_more(int than) const { return count_ > than; }
    void add(int more) {
        if (more < 0) return;
        count_ += more;
    }

 private:
    int count_ = 0;
};
int main() {
    Counter counter;
    counter.add(0);
    counter.add(fixed(2));
    std::puts(counter.is_more(3) ? "a < b" : "no");
}
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


def test_changes_of_python_leave_the_lines_around_them(tmp_path: Path) -> None:
    """Each change compiles, and keeps the number of lines."""
    file = tmp_path / "a.py"
    file.write_text(
        "def f(a):\n    é = 'é' + 'b' if (\n        a.b\n        < 3\n    ) else 'ü'; return (\n        é)\n# end\n"
    )
    changed = [site.applied(file.read_bytes()).decode() for site in python_sites(tmp_path, file)]
    assert len(changed) == 4
    for text in changed:
        compile(text, "a.py", "exec")
        assert text.count("\n") == 7 and text.endswith("# end\n")


def test_mutants_of_cpp_are_switched_by_the_environment(tmp_path: Path) -> None:
    """One program runs as it is written, or with one of the changes, and says which test reaches which."""
    source = tmp_path / "a.cpp"
    source.write_text(CPP)
    sites = list(cpp_sites(tmp_path, source))
    assert {site.function for site in sites} == {"Counter::is_more", "Counter::add", "main"}
    more = [site for site in sites if site.function != "main" and site.kind in ("comparison", "assignment")]
    write_switches(tmp_path, Path(), more)
    subprocess.run(["c++", "-std=c++20", "-o", tmp_path / "a", source], check=True, cwd=tmp_path)
    trace = tmp_path / "trace"

    def printed(**environment: str) -> str:
        return subprocess.run([tmp_path / "a"], env=os.environ | environment, capture_output=True, text=True).stdout

    changed = {site.change: printed(MUTANT=str(number)) for number, site in enumerate(more)}
    assert changed == {
        "count_ > than -> count_ >= than": "a < b\n",
        "more < 0 -> more <= 0": "no\n",
        "count_ += more; -> nothing": "no\n",
    }
    assert printed(MUTANT_TRACE=str(trace), PYTEST_CURRENT_TEST="t.py::t (call)") == "no\n"
    assert sorted(trace.read_text().splitlines()) == [f"{number} t.py::t (call)" for number in range(3)]
    assert Index(sites).find(more[0].record()) == more[0]
    line = more[1].lines[0] + 1
    assert list(refused(f"/somewhere/a.cpp:{line}:5: error: no", more)) == [1]
