"""A training with compressed gradients that was interrupted, whose files are damaged before it resumes from storage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity import SmartInfinityStrategy, TopK
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

__all__ = ["Bits", "Interrupted", "same"]

_RECIPE = Recipe(depth=1, width=8, max_steps=4, precision="32-true")

Bits = list[torch.Tensor]
"""A training's result: its residual and all masters."""


class _Broken(Exception):
    pass


class _Breaking(LitTiny):
    """A module that raises within its third step."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 2:
            raise _Broken


class Interrupted:
    """Holds the state that an interrupted training has left in a folder.

    Args:
        root: An empty folder.
        recipe: Recipe of the training.
        overlap: As the strategy's.

    Attributes:
        folder: The rank's folder, in which files may be damaged before :meth:`resumed`.
        expected: Bits that the training ends with if nothing interrupts it.
    """

    def __init__(self, root: Path, recipe: Recipe = _RECIPE, *, overlap: str = "none") -> None:
        self._root, self._saved, self._recipe, self._overlap = root, root / "saved", recipe, overlap
        self.expected = self._bits(LitTiny(recipe), root / "straight")
        try:
            self._bits(_Breaking(recipe), root / "state")
        except _Broken:
            shutil.copytree(root / "state", self._saved)
        self.folder = root / "state" / "default" / "rank-00000"

    def restore(self) -> None:
        """Put all files into their place again as the interrupted training has left them."""
        shutil.rmtree(self._root / "state", ignore_errors=True)
        shutil.copytree(self._saved, self._root / "state")

    def resumed(self) -> Bits:
        """Resume; return the bits that the training ends with."""
        return self._bits(LitTiny(self._recipe), self._root / "state", ckpt_path="storage")

    def _bits(self, module: LitTiny, storage: Path, **how: Any) -> Bits:
        transfer = {"tasklet_bytes": 64 * 1024, "num_buffers": 3}
        strategy = SmartInfinityStrategy(storage, compression=TopK(0.05), overlap=self._overlap, transfer=transfer)
        try:
            quiet_trainer(self._root, strategy, max_steps=self._recipe.max_steps, precision="32-true").fit(
                module, **how
            )
            strategy.drain()
            optimizer: Any = strategy._training_optimizer
            masters: Bits = []
            optimizer.rank_state.handler.state.scan(
                lambda window: masters.append(torch.from_numpy(window.arrays[0].copy()))
            )
            return [optimizer.rank_state.residual.clone(), *masters]
        finally:
            strategy.close()


def same(found: Bits, expected: Bits) -> bool:
    """Return whether every bit is equal."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
