"""Tools of this repository: mutants, whether the tests of cards run, and shell scripts with stand-ins for commands."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT
from tools import card_tests
from tools.card_tests import concerns_cards, decide, dependencies
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
    return json.loads((root.parent / out).read_text())  # type: ignore[no-any-return]


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
    results = map(json.loads, (tree.parent / "results").read_text().splitlines())
    told = {of_one["what"]: of_one["outcome"] for of_one in results}
    assert [what for what, outcome in told.items() if outcome == "survived"] == [
        f"made/__init__.py: unseen: {one['change']}" for one in chosen if one["function"] == "unseen"
    ]
    assert (
        sorted(told.values()) == ["caught", "caught", "caught", "survived", "unreached"]
        and git(tree, "status", "--porcelain") == []
    )

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


# ---- whether the tests of cards run


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def known() -> set[str]:
    return dependencies(ROOT)


@pytest.mark.parametrize(
    ("path", "concerned"),
    [
        ("lightning_smartinfinity/devices/smartssd/ring.py", True),
        ("lightning_smartinfinity/devices/base.py", True),  # imported by the cards' code
        ("lightning_smartinfinity/pipeline/step.py", True),  # imported by their tests
        ("lightning_smartinfinity/pipeline/rules/adam.py", True),  # imported by what their tests import
        ("lightning_smartinfinity/zero3/setup/update_device.py", True),  # imports the cards' code
        ("lightning_smartinfinity/cli/smartssd/report.py", True),
        ("lightning_smartinfinity/native/src/card/card_ring.cpp", True),
        ("lightning_smartinfinity/native/src/io/transfer.cpp", True),  # the source of a header that card/ includes
        ("lightning_smartinfinity/native/src/base/buffer.hpp", True),  # included by what card/ includes
        ("lightning_smartinfinity/native/src/module/bind_card.cpp", True),
        ("hls/emulator/card.cpp", True),
        ("hls/Makefile", True),
        ("tests/xrt/cards.py", True),
        ("tests/xrt/new.py", True),
        ("tests/helpers/card_runs.py", True),
        ("tests/pipeline/harness.py", True),  # imported by a helper
        ("tests/conftest.py", True),
        ("CMakeLists.txt", True),
        ("benchmarks/gpt2.py", True),
        ("docs/smartssd_kernels.md", True),
        ("lightning_smartinfinity/pipeline/gone.py", True),
        ("tests/helpers/gone.py", True),
        ("lightning_smartinfinity/native/src/watch/rank_watch.cpp", False),
        ("lightning_smartinfinity/export/shards.py", False),
        ("lightning_smartinfinity/cli/plan.py", False),
        ("lightning_smartinfinity/activations/store.py", False),
        ("lightning_smartinfinity/zero3/checkpoints/load/resharding.py", False),
        ("tests/export/conftest.py", False),
        ("benchmarks/gone.py", False),
        ("docs/smartssd.md", False),
        ("README.md", False),
    ],
)
def test_which_files_concern_cards(path: str, concerned: bool, known: set[str]) -> None:
    """The imports, the includes and the builds decide. A file that is gone counts, as its users are unknown."""
    assert "gone" in path or "new" in path or (ROOT / path).is_file()
    assert concerns_cards(path, known, ROOT) == concerned


def committed(folder: Path, path: str) -> str:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(f"{path}\n" * 20)
    commit(folder)
    return git(folder, "rev-parse", "HEAD")[0]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout on a branch, one commit after ``main``. The tests of cards depend on ``card.py`` alone."""
    monkeypatch.setattr(card_tests, "dependencies", lambda root: {"card.py"})
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    committed(tmp_path, "card.py")
    git(tmp_path, "switch", "--quiet", "-c", "branch")
    committed(tmp_path, "docs/page.md")
    return tmp_path


def test_what_the_base_is(checkout: Path) -> None:
    """It is the merge base with main, or a commit that is named; all commits after it count."""
    (landed,) = git(checkout, "rev-parse", "main")
    assert decide(checkout) == (False, f"as none of the 1 files that they depend on changed since {landed[:8]}")
    changing = committed(checkout, "hls/a.cpp")
    committed(checkout, "README.md")
    assert decide(checkout) == (True, f"as hls/a.cpp changed since {landed[:8]}") and not decide(checkout, changing)[0]
    git(checkout, "update-ref", "refs/remotes/origin/main", changing)
    assert not decide(checkout)[0]
    git(checkout, "mv", "card.py", "elsewhere.py")  # uncommitted changes count, too
    assert decide(checkout)[1].startswith("as card.py changed")


def test_an_unknown_base(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests run on the landed commit itself, without git, and after a wrong name."""
    assert decide(checkout, "nosuch") == (True, "as nosuch is unknown here")
    unknown = (True, "as the last landed commit is unknown here")
    assert decide(tmp_path_factory.mktemp("no_git")) == unknown
    git(checkout, "switch", "--quiet", "main")
    assert decide(checkout) == unknown


# ---- system_packages.sh and gpu_report.sh with stand-ins for id, apt-get, compilers and Python


COMMANDS = ("bash", "env", "xargs", "cat", "touch", "chmod", "echo", "mkdir")
PYTHON = """
case "$*" in
  *version_info*) exit {old} ;;
  *ensurepip*) exit {venv} ;;
  --version) echo "Python 3.8.1" ;;
esac
cat >/dev/null
exit {headers}
"""
INSTALL = "apt-get install -q -y --no-install-recommends"


class System:
    """A folder of commands that replaces the whole PATH."""

    def __init__(self, folder: Path, *, root: bool = True) -> None:
        self.commands = folder / "commands"
        self.commands.mkdir()
        for tool in COMMANDS:
            (self.commands / tool).symlink_to(Path("/usr/bin", tool))
        self.add("id", f"echo {0 if root else 1000}")

    def add(self, name: str, source: str = "") -> None:
        (self.commands / name).write_text(f"#!/usr/bin/env bash\n{source}\n")
        (self.commands / name).chmod(0o755)

    def add_apt(self, *paths: Path) -> None:
        """Add an apt-get whose packages hold these files; without files it fails to install."""
        install = "".join(f"\nmkdir -p {path.parent}; touch {path}; chmod +x {path}" for path in paths)
        self.add("apt-get", f'echo "apt-get $*"\n[ "$1" = install ] || exit 0{install}{"" if paths else "; exit 1"}')

    def run(self) -> tuple[int, str]:
        completed = subprocess.run(
            ["/usr/bin/bash", ROOT / "tools/system_packages.sh", "python3"],
            env={"PATH": str(self.commands)},
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
        )
        return completed.returncode, completed.stdout + completed.stderr


@pytest.mark.parametrize(
    ("lacks", "root", "apt", "status", "says"),
    [
        pytest.param("", True, "never", 0, [], id="complete"),
        pytest.param("g++", True, "g++", 0, [f"{INSTALL} g++"], id="compiler"),
        pytest.param("g++", False, "g++", 1, ["this system lacks: g++"], id="compiler, not root"),
        pytest.param("g++", True, None, 1, ["this system lacks: g++"], id="compiler, without apt-get"),
        pytest.param("liburing", True, "liburing", 0, [f"{INSTALL} liburing-dev"], id="liburing"),
        pytest.param("liburing", False, "never", 0, ["lacks liburing-dev"], id="liburing, not root"),
        pytest.param("liburing", True, "", 0, ["liburing-dev could not be installed"], id="liburing, without package"),
        pytest.param("venv headers", False, None, 1, ["lacks: python3-venv python3-dev"], id="two packages"),
        pytest.param("headers", True, "other", 1, ["still missing after apt-get: python3-dev"], id="own Python"),
        pytest.param("old", True, None, 1, ["Python 3.8.1", "make setup PYTHON="], id="old Python"),
        pytest.param("python3", True, None, 1, ["Python 3.10 or newer"], id="no Python"),
    ],
)
def test_system_packages(lacks: str, root: bool, apt: str | None, status: int, says: list[str], tmp_path: Path) -> None:
    """What is missing is installed by root with apt-get, or else named; liburing is optional."""
    system = System(tmp_path, root=root)
    if "python3" not in lacks:
        system.add("python3", PYTHON.format(**{part: int(part in lacks) for part in ("old", "venv", "headers")}))
    if "g++" not in lacks:
        system.add("g++", "exit 1" if "liburing" in lacks else "")
    if apt is not None:
        system.add_apt(*([system.commands / apt] if apt else []))
    ended, output = system.run()
    assert (ended == status and all(words in output for words in says) and says) or (
        output == "" and ("apt-get install -q" in output) == (root and apt not in (None, "never"))
    )


STAGES = ("nvidia-smi", "versions", "build", "tests", "step", "budgets", "activations")


def report(root: Path, python: str, storage: Path) -> tuple[int, dict[str, str]]:
    """Run the script with a Python that is a shell script, and return its status and the results of its stages."""
    for name, content in (("python", python), ("nvidia-smi", "echo a GPU")):
        (root / name).write_text(f"#!/bin/bash\n{content}\n")
        (root / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{root}:{os.environ['PATH']}", "PYTHON": "python"}
    done = subprocess.run(
        [ROOT / "tools/gpu_report.sh", root / "results", storage], env=environment, timeout=PROCESS_LIMIT, check=False
    )
    lines = (root / "results" / "report.txt").read_text().splitlines()[1:]
    return done.returncode, {line.split()[0]: line[13:22].strip() for line in lines}


def test_all_stages_pass(tmp_path: Path) -> None:
    """The results are the outputs; what was built is removed, a folder on the drive that was given stays."""
    storage = tmp_path / "drive"
    assert report(tmp_path, 'echo "$@"', storage) == (0, dict.fromkeys(STAGES, "passed"))
    assert (
        f"--storage {storage}" in (tmp_path / "results" / "step.txt").read_text()
        and {path.suffix for path in (tmp_path / "results").iterdir()} == {".txt"}
        and storage.is_dir()
    )


def test_stages_that_fail(tmp_path: Path) -> None:
    """The others run, the report says which failed, and so does the exit status."""
    status, found = report(tmp_path, '[[ "$*" != *install* && "$*" != *gpu_step* ]]', tmp_path / "results/storage")
    assert (status, found["build"], found["tests"], found["step"]) == (1, "failed:1", "passed", "failed:1")
