"""Models that ZeRO-3 partitioned while they were built, and that no engine was set up for, still answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.fabric.second_model_worker import loss_of, network, plain_losses
from tests.helpers.processes import run_module
from tests.helpers.trainers import fit


def test_a_second_model_on_two_processes(tmp_path: Path) -> None:
    """Two teachers of ``init_module``, one asked in parts first, answer on both ranks as in plain torch."""
    done = run_module("tests.fabric.second_model_worker", tmp_path, "2", ranks=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(plain_losses(), abs=1e-6)


class Distilled(pl.LightningModule):
    """A student whose teachers are its submodules, or are kept out of it."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.registered = registered
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.student, teachers = network(0), [network(1), network(2)]
        self.frozen = torch.nn.ModuleList(teachers).requires_grad_(False) if self.registered else None
        self.others = teachers  # a plain list is no submodule

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = loss_of(self.student, self.others, index)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(3, 1), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("registered", [True, False])
def test_teachers_of_configure_model(registered: bool, tmp_path: Path) -> None:
    """Within the LightningModule or out of it, they answer as in plain torch."""
    module = Distilled(registered=registered)
    fit(module, tmp_path, max_steps=3, precision="32-true")
    assert module.losses == pytest.approx(plain_losses(), abs=1e-6)
