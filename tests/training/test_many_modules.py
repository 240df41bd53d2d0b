"""The cost of a step grows with the number of modules, not with its square."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.trainers import fit

NUM_MODULES = 2000


class Scale(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Many(pl.LightningModule):
    """A long chain of small modules, which counts how often DeepSpeed looks at a module's parameters in each step."""

    def __init__(self, looks: list[int]) -> None:
        super().__init__()
        self.scales = nn.Sequential(*(Scale() for _ in range(NUM_MODULES)))
        self.looks, self.per_step = looks, []  # type: ignore[var-annotated]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.scales(batch).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_start(self, *_: Any) -> None:
        self.looks[0] = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.per_step.append(self.looks[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, 4), batch_size=1)  # type: ignore[arg-type]


def test_the_second_step_of_many_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at modules at most twice as often as the third, and a bounded number of times at each."""
    looks, original = [0], coordinator.iter_params

    def counted(*args: Any, **kwargs: Any) -> Any:
        looks[0] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(coordinator, "iter_params", counted)
    module = Many(looks)
    fit(module, tmp_path, precision="32-true")
    _, second, third = module.per_step
    assert NUM_MODULES < second <= 2 * third
    assert third < 20 * NUM_MODULES
