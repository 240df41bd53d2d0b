"""Activation checkpointing with weights shared between the segments trains like plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.long_cases import long_but
from tests.training.model_cases import CHECKPOINTS
from tests.training.model_runs import assert_trains_like_torch, train_near_storage

# Two processes train the others in turn.
USUAL = ("reentrant, small buckets", "not reentrant", "selective")


@pytest.mark.parametrize("name", long_but(USUAL, CHECKPOINTS))
def test_shared_weights_under_checkpoints_train_like_torch(name: str, tmp_path: Path) -> None:
    """Each arrival of a shared weight's gradient counts once, before or after its bucket has left.

    Stock DeepSpeed keeps the last arrival only, or fails an assertion if two fall into one bucket.
    """
    assert_trains_like_torch(CHECKPOINTS[name], train_near_storage(CHECKPOINTS[name], tmp_path))
