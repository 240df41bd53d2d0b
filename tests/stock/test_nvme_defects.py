"""Defects of stock DeepSpeed with optimizer state on NVMe, beside this strategy.

Every situation of :mod:`tests.stock.on_nvme` runs with our strategy and with stock. If stock is expected to fail, the
mark is strict: the test fails once stock passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.processes import run_module
from tests.stock.on_nvme import REASONS
from tests.stock.systems import OURS, stock_fails

pytestmark = pytest.mark.long  # tests/training has the same of our strategy, beside other references

CASES = {situation.__name__: reason for situation, reason in REASONS.items()}


def run(system: str, name: str, folder: Path) -> bool:
    """Run a situation in a process of its own, and return whether all was right."""
    done = run_module("tests.stock.situations", folder, system, name, "1")
    # An assertion here would count as stock's documented failure.
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr)[-6000:])
    outcome = torch.load(folder / "outcome.pt", weights_only=True)
    assert "error" not in outcome, outcome["error"]
    return bool(outcome["result"])


@pytest.mark.parametrize(
    ("system", "name"),
    [
        *((OURS, name) for name in CASES),
        *(stock_fails(reason, name) if reason else ("stock", name) for name, reason in CASES.items()),
    ],
)
def test_with_state_on_nvme(system: str, name: str, tmp_path: Path) -> None:
    """Ours is right, and stock is, or fails as described."""
    assert run(system, name, tmp_path)


@pytest.mark.parametrize("system", [OURS, stock_fails("its files stay for ever")])
def test_no_state_is_left_on_storage(system: str, tmp_path: Path) -> None:
    """After the process ends, no file is left in the storage folders."""
    if not run(system, "training", tmp_path):
        raise RuntimeError("the training went wrong")
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []
