"""The hard modules train like plain torch on two processes, where some partitions are padding only."""

from __future__ import annotations

import pytest

from tests.helpers.hard_models import Trained
from tests.training.model_cases import CASES
from tests.training.model_runs import assert_trains_like_torch, launch_cases

NAMES = (
    "a module in two parents",
    "tensors of odd sizes and not contiguous",
    "parameters in containers",
    "nested outputs",
    "empty parameter groups",
    "adapters, and an empty parameter group",
    "a tensor larger than ring and sub-group",
    "reentrant, one bucket",
    "reentrant, accumulating",
    "reentrant, bf16",
    "in bf16",
    "by one micro-batch",
    "a gradient penalty",
    "losses balanced by their slopes",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Train every case in turn in one pair of processes."""
    return launch_cases(NAMES, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_like_torch(name: str, trained: dict[str, Trained]) -> None:
    """Rank 0's losses, the masters and the update counts equal those of one torch process on both ranks' batches."""
    assert_trains_like_torch(CASES[name], trained[name], world_size=2)
