"""A small network whose hooks run functions of a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

Hook = Callable[["Small"], Any]


class Small(pl.LightningModule):
    """A network whose hooks run functions of a test, and note what these return.

    Args:
        term: Returns a term of the loss.
        **hooks: Functions by the names of Lightning's hooks.
    """

    def __init__(self, term: Hook | None = None, **hooks: Hook) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.term = term
        self.seen: list[Any] = []
        for name, hook in hooks.items():
            setattr(self, name, partial(self.note, hook))

    def note(self, hook: Hook, *_: object) -> None:
        result = hook(self)
        if result is not None:
            self.seen.append(result)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = ((self.net(batch) - 1) ** 2).mean()
        self.seen.append(float(loss.detach()))
        return loss if self.term is None else loss + self.term(self)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.net[0](batch)  # a part: what ZeRO-3 gathers ahead for the rest is still on its way afterwards

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader
