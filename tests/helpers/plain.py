"""Runs a scenario under plain Lightning and under the strategy: a user must see the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

# Four batches an epoch; values in fp32 agree with Lightning's own CPU strategy to rounding.
RECIPE = Recipe(epoch_batches=4, depth=1)
_TOLERANCE = 2e-4

MakeTrainer = Callable[..., pl.Trainer]
Scenario = Callable[[MakeTrainer, Path], Any]


class Everything(LitTiny):
    """Trains, validates, tests and predicts; its batches come from the loaders."""

    def __init__(self, recipe: Recipe = RECIPE) -> None:
        super().__init__(recipe)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch)  # type: ignore[no-any-return]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.model(batch)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.model(batch), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack([self.model(tokens[None]) for tokens in batch])

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return self.recipe.validation_loader()

    test_dataloader = predict_dataloader = val_dataloader


def assert_like_plain_lightning(scenario: Scenario, root: Path) -> Any:
    """Run a scenario under Lightning's own CPU strategy and under ours, in fp32; return what ours gave.

    Args:
        scenario: Takes a maker of Trainers (settings as for ``quiet_trainer``) and a folder of its own; what it returns
            is compared, numbers to rounding.
        root: An empty folder.
    """
    results = []
    for name, strategy in (("plain", "auto"), ("ours", None)):
        folder = root / name
        folder.mkdir()

        def make(_strategy: Any = strategy, _folder: Path = folder, **settings: Any) -> pl.Trainer:
            # For strategies of several processes Lightning shuffles the training batches.
            return quiet_trainer(
                _folder, _strategy, **{"precision": "32-true", "use_distributed_sampler": False, **settings}
            )

        results.append(scenario(make, folder))
    assert_alike(results[1], results[0])
    return results[1]


def assert_alike(ours: Any, theirs: Any, *, where: str = "result") -> None:
    """Assert that two results are equal, numbers up to rounding."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_alike(ours[key], theirs[key], where=f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{where}: {ours} instead of {theirs}"
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(one, other, where=f"{where}[{i}]")
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=_TOLERANCE, atol=_TOLERANCE, msg=lambda m: f"{where}: {m}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=_TOLERANCE, nan_ok=True), where
    else:
        assert ours == theirs, where


def assert_fits_like_plain_lightning(build: Callable[[], Any], root: Path, **settings: Any) -> Any:
    """Fit modules under both strategies; return losses and the number of steps, which are those of plain Lightning."""

    def scenario(make: MakeTrainer, _: Path) -> Any:
        trainer, module = make(**settings), build()
        trainer.fit(module)
        return module.losses, trainer.global_step

    return assert_like_plain_lightning(scenario, root)
