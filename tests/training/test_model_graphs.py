"""Graphs that autograd traverses more than once, or in part, train like plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import UnsupportedError
from tests.helpers.hard_models import Case
from tests.helpers.hard_structures import TwoBackwards
from tests.helpers.long_cases import long_but
from tests.training.model_cases import GRAPHS
from tests.training.model_runs import assert_trains_like_torch, train_near_storage

# Two processes train the others in turn, or another case has the same in another precision.
LONG = ("a gradient penalty", "losses balanced by their slopes", "two forwards, one backward")


@pytest.mark.parametrize("name", long_but([name for name in GRAPHS if name not in LONG], GRAPHS))
def test_unusual_graphs_train_like_torch(name: str, tmp_path: Path) -> None:
    """Parameters are gathered for retained graphs and for gradients of gradients.

    Stock ZeRO-3 has released them by then, and fails on shapes in the middle of the second backward.
    """
    assert_trains_like_torch(GRAPHS[name], train_near_storage(GRAPHS[name], tmp_path))


class Differentiable(TwoBackwards):
    """A module that asks for differentiable gradients of its parameters."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(self.case.batch(0), 0), create_graph=True)


def test_differentiable_gradients_of_parameters_are_refused(tmp_path: Path) -> None:
    """Gradients move to the arena as soon as they arrive. The error names torch.autograd.grad instead."""
    with pytest.raises(UnsupportedError, match=r"backward\(create_graph=.*torch.autograd.grad"):
        train_near_storage(Case(Differentiable), tmp_path)
