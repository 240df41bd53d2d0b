"""User code that touches partitioned parameters and their gradients behaves as in memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.processes import run_module
from tests.training.everyday_code import GRADIENTS, READS, TERMS, WRITES, run

ON_STORAGE = {"zero": {"offload_param": {"device": "nvme"}}, "transfer": TransferConfig(parameter_bytes="64KB")}


@cache
def in_memory(term: str | None) -> list[Any]:
    """Return what plain Lightning sees."""
    return run(Path(mkdtemp()), term=term)


def assert_same(seen: list[Any], term: str | None) -> None:
    """Assert that a fit saw what plain Lightning sees, to the rounding of sums in another order."""
    expected = in_memory(term)
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        if isinstance(theirs, tuple) and theirs and isinstance(theirs[0], str):
            assert ours[0] == theirs[0]
            assert flat(ours[1]) == pytest.approx(flat(theirs[1]), rel=1e-4, abs=1e-6), ours[0]
        else:
            assert flat(ours) == pytest.approx(flat(theirs), rel=1e-4, abs=1e-6)


def flat(value: Any) -> list[Any]:
    """Return the numbers of a nested value; text becomes its hash."""
    if isinstance(value, dict):
        return [number for key, each in sorted(value.items()) for number in (*flat(key), *flat(each))]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in flat(each)]
    return [float(hash(value) % 1000) if isinstance(value, str) else float(value or 0)]


@pytest.mark.parametrize(
    "options",
    [{"overlap": "none"}, {"overlap": "backward"}, {"state_format": "fp32", **ON_STORAGE}],
    ids=["no overlap", "backward", "parameters on storage"],
)
@pytest.mark.parametrize("builds_late", [False, True])
def test_hooks_read_and_write_parameters_and_gradients(
    options: dict[str, Any], builds_late: bool, tmp_path: Path
) -> None:
    """Groups by shape, writes, reads and gradients are those of memory, one after the other in one fit."""
    assert len(WRITES) > 15 and len(READS) > 15 and len(GRADIENTS) > 8
    assert_same(run(tmp_path, SmartInfinityStrategy(tmp_path / "s", **options), builds_late=builds_late), None)


@pytest.mark.parametrize("term", TERMS)
def test_terms_of_the_loss_over_parameters(term: str, tmp_path: Path) -> None:
    """Penalties train as in memory, before or after the forward, over parameters, views and kept ones."""
    assert_same(run(tmp_path, SmartInfinityStrategy(tmp_path / "s", overlap="backward"), term=term), term)


def test_two_processes(tmp_path: Path) -> None:
    """Both ranks see what one process sees of the same data."""
    done = run_module("tests.training.everyday_code", tmp_path, ranks=2)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    for rank in range(2):
        for term, seen in torch.load(tmp_path / f"{rank}.pt", weights_only=False).items():
            assert_same(seen, term)
