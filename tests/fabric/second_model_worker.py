"""Asks models that Fabric did not set up, on each rank: ``python -m tests.fabric.second_model_worker OUT DEVICES``.

The losses of each rank go to ``OUT/<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.fabric.worker import quiet_fabric


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


def main() -> None:
    out = Path(sys.argv[1])
    fabric = quiet_fabric(out / "storage", devices=int(sys.argv[2]))
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
    (out / f"{fabric.global_rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
