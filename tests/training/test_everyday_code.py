"""User code that touches partitioned parameters and their gradients behaves as in memory, through each door."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_smartinfinity import TransferConfig
from tests.helpers.ranks import on_ranks
from tests.training.everyday_code import DOORS, GRADIENTS, READS, TERMS, WRITES, on_each_rank

BACKWARD = {"overlap": "backward"}
ON_STORAGE = {
    "state_format": "fp32",
    "zero": {"offload_param": {"device": "nvme"}},
    "transfer": TransferConfig(parameter_bytes="64KB"),
}


@cache
def in_memory(door: str, terms: bool) -> list[Any]:
    """Return what the same training sees in memory."""
    with TemporaryDirectory() as folder:
        return DOORS[door](Path(folder), None, terms=terms)


def assert_same(seen: list[Any], door: str, terms: bool) -> None:
    """Assert that a training saw what it sees in memory, to the rounding of sums in another order."""
    expected = in_memory(door, terms)
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
    ("door", "options", "late"),
    [
        ("Lightning", {"overlap": "none"}, True),
        ("Lightning", BACKWARD, False),
        ("Lightning", ON_STORAGE, False),
        ("Lightning", ON_STORAGE, True),
        ("Fabric", BACKWARD, False),
        ("Fabric", ON_STORAGE, True),
        ("transformers", BACKWARD, False),
        ("transformers", ON_STORAGE, True),
    ],
)
def test_hooks_read_and_write_parameters_and_gradients(
    door: str, options: dict[str, Any], late: bool, tmp_path: Path
) -> None:
    """Groups by shape, writes, reads and gradients are those of memory, one after the other in one training."""
    assert len(WRITES) > 15 and len(READS) > 15 and len(GRADIENTS) > 8
    assert_same(DOORS[door](tmp_path, options, late=late), door, False)


@pytest.mark.parametrize("door", DOORS)
def test_terms_of_the_loss_over_parameters(door: str, tmp_path: Path) -> None:
    """Penalties train as in memory, before or after the forward, over parameters, views and kept ones."""
    assert len(TERMS) > 8
    assert_same(DOORS[door](tmp_path, BACKWARD, terms=True), door, True)


def test_two_processes(tmp_path: Path) -> None:
    """Both ranks see what one process sees of the same data."""
    for of_rank in on_ranks(on_each_rank, tmp_path):
        for (door, terms), seen in of_rank.items():
            assert_same(seen, door, terms)
