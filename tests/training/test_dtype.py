"""``self.dtype`` of a LightningModule tells the dtype of its parameters in the training."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.fabric.worker import quiet_fabric
from tests.helpers.trainers import fit

DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
}


class Inner(pl.LightningModule):
    """A LightningModule within another, as in distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Told(pl.LightningModule):
    """Records the dtypes of itself, of its inner module and of its parameters in a step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.seen: set[Any] = set()
        if where == "init":
            self.inner = Inner()

    def configure_model(self) -> None:
        if self.where == "configure_model":
            self.inner = Inner()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen |= {self.dtype, self.inner.dtype, *(param.dtype for param in self.parameters())}
        return self.inner(batch.to(self.dtype)).float().square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, 4), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["init", "configure_model"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_dtype_in_a_fit(precision: str, where: str, tmp_path: Path) -> None:
    """It is that of the parameters with every precision, for inner modules as well."""
    module = Told(where)
    fit(module, tmp_path, precision=precision, max_steps=1)
    assert module.seen == {DTYPES[precision]}


@pytest.mark.parametrize("where", ["init", "configure_model"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-true"])
def test_dtype_in_fabric(precision: str, where: str, tmp_path: Path) -> None:
    """The LightningModule that Fabric sets up tells it too, built under init_module or before."""
    fabric = quiet_fabric(tmp_path / "storage", precision=precision)
    with fabric.init_module() if where == "configure_model" else nullcontext():
        module = Inner()
    fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1e-3))
    assert {module.dtype, *(param.dtype for param in module.parameters())} == {DTYPES[precision]}
    fabric.strategy.close()
