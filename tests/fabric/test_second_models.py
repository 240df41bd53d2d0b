"""Models that ZeRO-3 partitioned while they were built, and that no engine was set up for, still answer."""

from __future__ import annotations

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


def plain_losses() -> list[float]:
    """Return the losses of plain torch."""
    model, teachers = network(0), [network(1), network(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = loss_of(model, teachers, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_on_ranks(root: Path) -> list[float]:
    """Return the losses of a student whose teachers Fabric did not set up."""
    fabric = quiet_fabric(root / "storage", devices=2)
    with fabric.init_module():
        teachers = [network(1), network(2)]
    parameters: list[Any] = [param for teacher in teachers for param in teacher.parameters()]
    assert all(param.ds_status.name == "NOT_AVAILABLE" for param in parameters), "nothing is partitioned"
    net = network(0)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        loss = loss_of(model, teachers, step)
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fabric.strategy.close()
    return losses


def test_a_second_model_on_two_processes(tmp_path: Path) -> None:
    """Two teachers of ``init_module``, one asked in parts first, answer on both ranks as in plain torch."""
    for losses in on_ranks(train_on_ranks, tmp_path):
        assert losses == pytest.approx(plain_losses(), abs=1e-6)


class Distilled(Small):
    """A student whose teachers are its submodules, or are kept out of it."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.registered = registered

    def configure_model(self) -> None:
        self.net, teachers = network(0), [network(1), network(2)]
        self.frozen = nn.ModuleList(teachers).requires_grad_(False) if self.registered else None
        self.others = teachers  # a plain list is no submodule

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = loss_of(self.net, self.others, index)
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


@pytest.mark.parametrize("registered", [True, False])
def test_teachers_of_configure_model(registered: bool, tmp_path: Path) -> None:
    """Within the LightningModule or out of it, they answer as in plain torch."""
    module = Distilled(registered=registered)
    fit(module, tmp_path, max_steps=3, precision="32-true", limit_val_batches=0)
    assert module.seen == pytest.approx(plain_losses(), abs=1e-6)
