"""The measurements of tools/house.py see what git tracks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house import git, left_of, sources


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a repository with a product's folder."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "hls").mkdir()
    return tmp_path


def commit(root: Path, text: str) -> str:
    """Commit a file with this text and return the commit's name."""
    (root / "hls/a.py").write_text(text)
    git(root, "add", "hls/a.py")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "Change it")
    return git(root, "rev-parse", "HEAD")[0]


def test_what_is_left_of_a_commit(checkout: Path) -> None:
    """Only the code lines of the commit that nobody changed are counted."""
    commit(checkout, "a = 1\n")
    second = commit(checkout, 'a = 1\n\n\ndef f():\n    """A sentence."""\n    # A comment.\n    return 2\n')
    commit(checkout, 'a = 1\n\n\ndef f():\n    """A sentence."""\n    # A comment.\n    return 3\n')
    assert list(left_of(checkout, second)) == ["     1 hls/a.py", "     1 all"]


def test_untracked_files_do_not_count(checkout: Path) -> None:
    """What a build leaves in the folder is no source file."""
    commit(checkout, "a = 1\n")
    (checkout / "hls/generated.py").write_text("b = 2\n")
    assert list(sources(checkout)) == [checkout / "hls/a.py"]
