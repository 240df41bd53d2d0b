"""User code that touches partitioned parameters and their gradients behaves as in memory, through each door."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_smartinfinity import TransferConfig
from tests.helpers.plain import assert_alike
from tests.helpers.ranks import on_ranks
from tests.training.everyday_code import DOORS, on_each_rank

# Some parameters are gathered for a write, and smaller ones stay whole.
BACKWARD = {"overlap": "backward", "zero": {"stage3_param_persistence_threshold": 64}}
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


@pytest.mark.parametrize(
    ("door", "options", "late"),
    [
        ("Lightning", {"overlap": "none"}, True),
        ("Lightning", BACKWARD, False),
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
    assert_alike(DOORS[door](tmp_path, options, late=late), in_memory(door, False))


@pytest.mark.parametrize("door", DOORS)
def test_terms_of_the_loss_over_parameters(door: str, tmp_path: Path) -> None:
    """Penalties train as in memory, before or after the forward, over parameters, views and kept ones."""
    assert_alike(DOORS[door](tmp_path, BACKWARD, terms=True), in_memory(door, True))


def test_two_processes(tmp_path: Path) -> None:
    """Both ranks see what one process sees of the same data."""
    for of_rank in on_ranks(on_each_rank, tmp_path):
        for (door, terms), seen in of_rank.items():
            assert_alike(seen, in_memory(door, terms))
