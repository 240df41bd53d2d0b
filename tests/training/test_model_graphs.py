"""Graphs that autograd goes through more than once, or not as a whole, train like plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import UnsupportedError
from tests.helpers.hard_models import Case
from tests.helpers.hard_structures import Penalty
from tests.training.model_cases import GRAPHS
from tests.training.model_runs import assert_trains_like_torch, train_near_storage


@pytest.mark.parametrize("name", GRAPHS)
def test_unusual_graphs_train_like_torch(name: str, tmp_path: Path) -> None:
    """Retained graphs and gradients of gradients find their parameters gathered.

    Stock ZeRO-3 has released them: it fails on shapes in the middle of the second backward.
    """
    assert_trains_like_torch(GRAPHS[name], train_near_storage(GRAPHS[name], tmp_path))


class Differentiable(Penalty):
    """Wants gradients of its parameters that can be differentiated."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(self.case.batch(0), 0), create_graph=True)


def test_differentiable_gradients_of_parameters_are_refused(tmp_path: Path) -> None:
    """They leave for the arena as soon as they are there; torch.autograd.grad is named as the way."""
    with pytest.raises(UnsupportedError, match=r"backward\(create_graph=.*torch.autograd.grad"):
        train_near_storage(Case(manual(Differentiable)), tmp_path)


def manual(kind: type[Penalty]) -> Any:
    """Builds a module that optimizes by hand."""

    def build() -> Penalty:
        module = kind()
        module.automatic_optimization = False
        return module

    return build
