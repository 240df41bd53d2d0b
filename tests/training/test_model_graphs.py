"""Graphs that autograd goes through more than once, or not as a whole, train like plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.model_cases import GRAPHS
from tests.training.model_runs import assert_trains_like_torch, train_near_storage


@pytest.mark.parametrize("name", GRAPHS)
def test_unusual_graphs_train_like_torch(name: str, tmp_path: Path) -> None:
    """Retained graphs and gradients of gradients find their parameters gathered.

    Stock ZeRO-3 has released them: it fails on shapes in the middle of the second backward.
    """
    assert_trains_like_torch(GRAPHS[name], train_near_storage(GRAPHS[name], tmp_path))
