"""A small network whose hooks run functions of a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy
from tests.helpers.trainers import quiet_trainer

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


def fitted(root: Path, module: Small, strategy: Any = None, **settings: Any) -> Small:
    """Fit for an epoch in fp32 by our strategy, or by another."""
    strategy = SmartInfinityStrategy(root / "storage") if strategy is None else strategy
    options = {"max_epochs": 1, "precision": "32-true", "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    quiet_trainer(root, strategy, **{**options, **settings}).fit(module)
    return module


def assert_as_in_memory(
    root: Path,
    make: Callable[[], Small],
    strategy: Any = None,
    *,
    between: Callable[[Small], object] | None = None,
    **settings: Any,
) -> None:
    """Assert that a fit sees what a fit in memory sees, and ends with the same weights, or two fits."""
    ours, theirs = make(), make()
    for folder, module, chosen in ((root / "ours", ours, strategy), (root / "theirs", theirs, "auto")):
        fitted(folder, module, chosen, **settings)
        if between is not None:
            between(module)
            fitted(folder, module, chosen, **settings)
    assert len(ours.seen) > 2 and ours.seen == pytest.approx(theirs.seen, rel=1e-5)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.detach().clone(), other.detach())


def changed(change: Callable[[Any], object], **hooks: Any) -> Callable[[], Small]:
    """Return a function that makes a network and changes it."""

    def make() -> Small:
        module = Small(**hooks)
        change(module)
        return module

    return make
