"""Planted violations break the layer contracts that forbid them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT

ROOT = Path(__file__).parents[2]

VIOLATIONS = {
    "storage/_planted.py": ("import torch", "native and storage know no torch"),
    "native/_planted.py": ("import torch", "native and storage know no torch"),
    "pipeline/state/_planted.py": ("import deepspeed.runtime", "Only zero3 imports deepspeed"),
    "pipeline/step.py": ("import lightning_smartinfinity.devices.smartssd", "SmartSSDs are a guest wing"),
    "_planted.py": ("", "Imports go one way"),  # a new room without a place in the layers
    "devices/_planted.py": ("import lightning_smartinfinity.pipeline", "Imports go one way"),
    "settings/transfer.py": ("import lightning_smartinfinity.storage", "Imports go one way"),
    "storage/io/_planted.py": ("import lightning_smartinfinity.storage.folders", "The rooms of storage import one way"),
    "pipeline/_planted.py": ("", "The rooms of pipeline import one way"),
    "zero3/_planted.py": ("", "The rooms of zero3 import one way"),  # a new module without a place in the layers
    "zero3/parameters/_planted.py": (
        "import lightning_smartinfinity.zero3.optimizer",
        "The rooms of zero3 import one way",
    ),
    "zero3/checkpoints/formats/_planted.py": (
        "import lightning_smartinfinity.zero3.checkpoints.save",
        "The rooms of zero3.checkpoints import one way",
    ),
    "zero3/optimizer/_planted.py": ("import lightning.pytorch", "Only the integrations import lightning"),
    "integrations/trainer/callbacks.py": ("import pytorch_lightning", "Only the lightning namespace"),
    "integrations/fabric/_planted.py": (
        "import lightning_smartinfinity.integrations.trainer",
        "No integration imports another",
    ),
    "pipeline/layout/partition_layout.py": ("import os", "The layout is pure arithmetic"),
    "_autoload.py": ("import lightning_smartinfinity.settings", "Discovery imports nothing of the package"),
}


@pytest.fixture
def copy_of_package(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "lightning_smartinfinity",
        tmp_path / "lightning_smartinfinity",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


# An editable installation would find the package before the linter's folder.
LINT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
sys.path.insert(0, "")
from importlinter.cli import lint_imports_command
lint_imports_command(["--no-cache", "--no-logo"])
"""


def broken_contracts(folder: Path) -> list[str]:
    """Return the contracts that import-linter finds broken in a copy of the package."""
    completed = subprocess.run(
        [sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True, timeout=PROCESS_LIMIT
    )
    lines = completed.stdout.splitlines()
    broken = [line.split(" BROKEN")[0] for line in lines if " BROKEN" in line]
    assert bool(broken) == bool(completed.returncode), completed.stdout + completed.stderr
    return broken


def test_every_violation_is_found(copy_of_package: Path) -> None:
    """One forbidden import for each contract, and for each room, breaks it; the package breaks none."""
    assert broken_contracts(copy_of_package) == []
    for file, (line, _) in VIOLATIONS.items():
        with (copy_of_package / "lightning_smartinfinity" / file).open("a") as source:
            source.write(f"\n{line}\n")
    assert set(broken_contracts(copy_of_package)) >= {contract for _, contract in VIOLATIONS.values()}
