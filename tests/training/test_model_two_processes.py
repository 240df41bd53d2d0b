"""The hard modules train like plain torch on two processes, where some partitions are padding only."""

from __future__ import annotations

import pytest

from tests.helpers.hard_models import Trained
from tests.helpers.long_cases import long_but
from tests.helpers.ranks import on_ranks
from tests.training.model_cases import CASES
from tests.training.model_runs import assert_trains_like_torch, on_each_rank

USUAL = (
    "tensors of odd sizes and not contiguous",
    "adapters, and an empty parameter group",
    "a tensor larger than ring and sub-group",
    "reentrant, accumulating",
    "by one micro-batch",
    "losses balanced by their slopes",
)
NAMES = (
    *USUAL,
    "a module in two parents",
    "parameters in containers",
    "nested outputs",
    "empty parameter groups",
    "reentrant, one bucket",
    "reentrant, bf16",
    "in bf16",
    "a gradient penalty",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Trained]:
    """Train every case of these tests in turn in one pair of processes."""
    names = NAMES if request.config.getoption("long") else USUAL
    return on_ranks(on_each_rank, tmp_path_factory.mktemp("two"), *names)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", long_but(USUAL, NAMES))
def test_two_processes_train_like_torch(name: str, trained: dict[str, Trained]) -> None:
    """Rank 0's losses, the masters and the update counts equal those of one torch process on both ranks' batches."""
    assert_trains_like_torch(CASES[name], trained[name], world_size=2)
