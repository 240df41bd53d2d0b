"""``tools/card_tests.py``: whether the tests of cards run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import card_tests
from tools.card_tests import concerns_cards, decide, dependencies

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


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def committed(folder: Path, path: str) -> str:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(f"{path}\n" * 20)
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "a")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout on a branch, one commit after ``main``. The tests of cards depend on ``card.py`` alone."""
    monkeypatch.setattr(card_tests, "dependencies", lambda root: {"card.py"})
    git(tmp_path, "init")
    committed(tmp_path, "card.py")
    git(tmp_path, "switch", "-c", "branch")
    committed(tmp_path, "docs/page.md")
    return tmp_path


def test_what_the_base_is(checkout: Path) -> None:
    """It is the merge base with main, or a commit that is named; all commits after it count."""
    landed = git(checkout, "rev-parse", "main")
    assert decide(checkout) == (False, f"as none of the 1 files that they depend on changed since {landed[:8]}")
    changing = committed(checkout, "hls/a.cpp")
    committed(checkout, "README.md")
    assert decide(checkout) == (True, f"as hls/a.cpp changed since {landed[:8]}")
    assert not decide(checkout, changing)[0]
    git(checkout, "update-ref", "refs/remotes/origin/main", changing)
    assert not decide(checkout)[0]
    git(checkout, "mv", "card.py", "elsewhere.py")  # what is not committed counts, too
    assert decide(checkout)[1].startswith("as card.py changed")


def test_an_unknown_base(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests run on the landed commit itself, without git, and after a wrong name."""
    assert decide(checkout, "nosuch") == (True, "as nosuch is unknown here")
    unknown = (True, "as the last landed commit is unknown here")
    assert decide(tmp_path_factory.mktemp("no_git")) == unknown
    git(checkout, "switch", "main")
    assert decide(checkout) == unknown
