from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_LAUNCHED = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "LOCAL_SIZE"}
_MODULES = ("byte_lm", "finetune_text", "finetune_text_cli", "report", "text_folder")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the examples, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in _MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


@pytest.fixture
def run_example(tmp_path: Path) -> Callable[..., str]:
    """Runs a script of the examples in an empty folder; what it printed. It must end as ``status`` says."""

    def run(script: str, *arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / script), *arguments],
            cwd=tmp_path,
            env=_fresh_environment(),
            capture_output=True,
            text=True,
            timeout=600,
        )
        output = done.stdout + done.stderr
        assert done.returncode == status, output[-6000:]
        return output

    return run


def _fresh_environment() -> dict[str, str]:
    # A fit in this process has left in it what a launcher would set. Models this small run best on one thread.
    left = _LAUNCHED | {"DS_ACCELERATOR"}
    kept = {name: value for name, value in os.environ.items() if name not in left and not name.startswith("PL_")}
    return {**kept, "OMP_NUM_THREADS": "1"}
