"""Fits on two emulated cards, and the same ones on the host for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity import SmartInfinityStrategy, SmartSSDConfig, TransferConfig
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit
from tests.xrt.cards import EmulatedCards

__all__ = ["SMALL_RING", "Reporting", "arrays_of", "assert_same", "on_cards", "on_host", "same_arrays", "trained"]

SMALL_RING = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3)


def arrays_of(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Return every array of every parameter."""
    handler = trainer.strategy._training_optimizer.update.drained_handler()
    arrays = [handler.state.read_parameter(index) for index in range(len(handler.steps))]
    return [{name: torch.from_numpy(values.copy()) for name, values in each.items()} for each in arrays]


class Reporting(LitTiny):
    """Keeps its final state, which it reads before the storage is closed."""

    arrays: list[dict[str, torch.Tensor]]

    def on_train_end(self) -> None:
        self.arrays = arrays_of(self.trainer)


def on_cards(cards: EmulatedCards, root: Path, **settings: Any) -> SmartInfinityStrategy:
    """Return a strategy for two cards; ``config`` has settings of SmartSSDConfig."""
    config = SmartSSDConfig(xclbin=cards.build.xclbin, **settings.pop("config", {}))
    return SmartInfinityStrategy(
        [root / "ssd0", root / "ssd1"],
        **{"update_device": "smartssd", "smartssd": config, "transfer": SMALL_RING, "overlap": "none", **settings},
    )


def on_host(root: Path) -> SmartInfinityStrategy:
    return SmartInfinityStrategy(root / "disk", update_device="host", transfer=SMALL_RING, overlap="none")


def trained(recipe: Recipe, root: Path, strategy: SmartInfinityStrategy, module: Any = None, **settings: Any) -> Any:
    """Fit a module, by default one that reports, close the strategy and return the module."""
    module = module or Reporting(recipe)
    settings = {"precision": recipe.precision, "max_steps": recipe.max_steps, **settings}
    fit(module, root, strategy, accumulate_grad_batches=recipe.accumulate, gradient_clip_val=recipe.clip, **settings)
    strategy.close()
    return module


def assert_same(module: Reporting, expected: Reporting) -> None:
    """Assert equal losses and equal arrays of every parameter."""
    assert module.losses == expected.losses
    assert same_arrays(module.arrays, expected.arrays)


def same_arrays(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> bool:
    """Return whether all arrays are equal bit for bit."""
    return len(found) == len(expected) and all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
        for mine, theirs in zip(found, expected, strict=True)
    )
