"""Builds models in configure_model, in this process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity.zero3.parameters import gather_on_use
from tests.helpers.initialised import WIDTH, Initialised
from tests.helpers.trainers import quiet_trainer


class Built(pl.LightningModule):
    """A module that builds its model in configure_model.

    ``weights`` holds the values before the first step, ``losses`` one loss per step.
    """

    def __init__(self, build: Callable[[], nn.Module], loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.build, self.loss = build, loss
        self.weights: dict[str, torch.Tensor] = {}
        self.first_buffers: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        # Whether ZeRO-3 had partitioned each parameter when configure_model ended.
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)  # only the values of rank 0 count
        self.model = self.build()
        self.partitioned = [hasattr(param, "ds_id") for param in self.model.parameters()]

    def on_train_start(self) -> None:
        for name, param in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters(param):
                self.weights[name] = param.detach().clone()
        self.first_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(inputs(), batch_size=2)  # type: ignore[arg-type]


def inputs() -> torch.Tensor:
    """Return four samples."""
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss for :class:`Initialised`."""
    return model(batch.to(next(model.parameters()).dtype)).float().square().mean()


def fit(module: Built, root: Path, **settings: Any) -> Built:
    """Fit for one step."""
    trainer = quiet_trainer(root, **{"precision": "32-true", "max_steps": 1, **settings})
    trainer.fit(module)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module


def on_each_rank(out: Path) -> dict[str, Any]:
    """Return what a rank sees in two precisions; ZeRO-3 partitions parameters again as soon as others are used."""
    gather_on_use._GATHERED_BYTES = 0
    seen = {}
    for precision in ("32-true", "bf16-mixed"):
        module = fit(Built(Initialised, squares), out, devices=2, precision=precision)
        seen[precision] = {"weights": module.weights, "buffers": module.first_buffers}
    return seen
