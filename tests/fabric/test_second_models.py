"""Models that ZeRO-3 partitioned while they were built, and that no engine was set up for, still answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fabric.worker import quiet_fabric
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit
from tests.training.small import Small


def network(seed: int) -> nn.Sequential:
    """Return a network with an inner one."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 3))


def loss_of(model: nn.Module, teachers: list[nn.Sequential], step: int) -> torch.Tensor:
    """Return the distance to all teachers, of which the last is asked in parts first."""
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    with torch.no_grad():
        *_, last = teachers
        answers = [last[2](last[1](last[0](rows))), *(teacher(rows) for teacher in teachers)]
    return sum((model(rows) - answer).square().mean() for answer in answers)  # type: ignore[return-value]


def train(model: Any, optimizer: Any, teachers: list[nn.Sequential], backward: Callable[..., Any]) -> list[float]:
    losses = []
    for step in range(3):
        loss = loss_of(model, teachers, step)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_losses() -> list[float]:
    """Return the losses of plain torch."""
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train(model, optimizer, [network(1), network(2)], torch.Tensor.backward)


def train_on_ranks(root: Path) -> list[float]:
    """Return the losses of a student whose teachers Fabric did not set up."""
    fabric = quiet_fabric(root / "storage", devices=2)
    with fabric.init_module():
        teachers = [network(1), network(2)]
    parameters: list[Any] = [param for teacher in teachers for param in teacher.parameters()]
    assert all(param.ds_status.name == "NOT_AVAILABLE" for param in parameters), "nothing is partitioned"
    net = network(0)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = train(model, optimizer, teachers, partial(fabric.backward, model=model))
    fabric.strategy.close()
    return losses


def test_a_second_model_on_two_processes(tmp_path: Path) -> None:
    """Two teachers of ``init_module``, one asked in parts first, answer on both ranks as in plain torch."""
    for losses in on_ranks(train_on_ranks, tmp_path):
        assert losses == pytest.approx(plain_losses(), abs=1e-6)


class Distilled(Small):
    """A student whose first teacher is its submodule, while the other one is kept out of it."""

    def configure_model(self) -> None:
        self.net, self.frozen = network(0), network(1).requires_grad_(False)
        self.others = [self.frozen, network(2)]  # a plain list is no submodule

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = loss_of(self.net, self.others, index)
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def test_teachers_of_configure_model(tmp_path: Path) -> None:
    """Within the LightningModule and out of it, they answer as in plain torch."""
    module = Distilled()
    fit(module, tmp_path, max_steps=3, precision="32-true", limit_val_batches=0)
    assert module.seen == pytest.approx(plain_losses(), abs=1e-6)
