from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.model_folder import TEXT, make_model_folder
from tests.helpers.processes import run_module

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_MODULES = [path.stem for path in EXAMPLES.glob("*.py")]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of the examples, which are scripts and not a package."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in _MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


@pytest.fixture
def run_example(tmp_path: Path) -> Callable[..., str]:
    """Run an example script in an empty folder, assert its exit status, and return its output."""

    def run(script: str, *arguments: str, status: int = 0) -> str:
        done = run_module("tests.examples.script", tmp_path, script, *arguments)
        output = done.stdout + done.stderr
        assert done.returncode == status, output[-6000:]
        return output

    return run


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with what the pages take for granted, a model and a text, and go there."""
    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path / "my-model")
    (tmp_path / "my-text.txt").write_text(TEXT)
    return tmp_path
