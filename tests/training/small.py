"""A small network whose hooks run functions of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

Hook = Callable[["Small"], Any]
NOTHING = lambda module: None  # noqa: E731


class Small(pl.LightningModule):
    """A network whose hooks run functions of a test, and note what these return."""

    def __init__(self, **hooks: Hook) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.hooks = hooks
        self.seen: list[Any] = []

    def run(self, name: str) -> Any:
        result = self.hooks.get(name, NOTHING)(self)
        if result is not None:
            self.seen.append(result)
        return result

    def on_train_start(self) -> None:
        self.run("on_train_start")

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = ((self.net(batch) - 1) ** 2).mean()
        self.seen.append(float(loss.detach()))
        term = self.hooks.get("term")
        return loss if term is None else loss + term(self)

    def on_train_batch_end(self, *args: object) -> None:
        self.run("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.run("on_validation_epoch_end")

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.net[0](batch)  # a part: what ZeRO-3 gathers ahead for the rest is still on its way afterwards

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader
