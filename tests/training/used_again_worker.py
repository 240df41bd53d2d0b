"""Uses a weight once more in a step than in those before: ``python -m tests.training.used_again_worker FOLDER RANKS``.

The blocks are checkpointed segments, whose gradients arrive as each is recomputed. In the fifth step the first segment
runs the last block, too, whose gradients have arrived, and have been given up, long before the first segment's.

Every rank writes to ``rank-<n>.json`` the error of that step, and which masters differ from those of a training
without overlap that ends before it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity import SmartInfinityStrategy, UnsupportedError
from tests.helpers.models import LitTiny
from tests.helpers.trainers import quiet_trainer
from tests.training.test_gradient_budget import BUDGET, PLAIN, run_of

RECIPE = dataclasses.replace(PLAIN, depth=4)
STEP = 4


class Segment(nn.Module):
    """A block whose forward is run again in backward, after other blocks if there are some."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.others: list[nn.Module] = []  # a list, since they are part of the model already

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._run, x, use_reentrant=True)

    def _run(self, x: torch.Tensor) -> Any:
        for other in self.others:
            x = other(x)
        return self.block(x)


class Again(LitTiny):
    """A module whose first segment runs the last block, too, in one step."""

    def __init__(self) -> None:
        super().__init__(RECIPE)
        self.model.blocks = nn.ModuleList(Segment(block) for block in self.model.blocks)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        first, *_, last = self.model.blocks
        first.others = [last.block] if self.trainer.global_step == STEP else []  # type: ignore[assignment, list-item]


def trained(root: Path, overlap: str, *, budget: int | None = None, **settings: Any) -> tuple[Any, Again, str]:
    """Return the optimizer, the module and the error after a training."""
    run, error = run_of(root, RECIPE, overlap, budget=budget), ""
    strategy = SmartInfinityStrategy(root / "storage", transfer=run.transfer, **run.options)
    module = Again()
    try:
        quiet_trainer(root, strategy, precision=RECIPE.precision, **settings).fit(module)
    except UnsupportedError as failure:
        error = str(failure)
    return strategy.optimizers[0], module, error


def masters(optimizer: Any, module: Again) -> dict[str, torch.Tensor]:
    return {name: optimizer.get_full_hp_param(param).clone() for name, param in module.named_parameters()}


def main() -> None:
    root, devices = Path(sys.argv[1]), int(sys.argv[2])
    straight = trained(root / "straight", "none", devices=devices, max_steps=STEP)
    expected = masters(*straight[:2])
    optimizer, module, error = trained(root / "binding", "backward", budget=2 * BUDGET, devices=devices, max_steps=6)
    found = masters(optimizer, module)
    outcome = {
        "error": error,
        "binding": optimizer.speculation.num_binding,
        "generation": optimizer.update.drained_handler().generation,
        "differ": [name for name, master in expected.items() if not torch.equal(found[name], master)],
    }
    (root / f"rank-{module.global_rank}.json").write_text(json.dumps(outcome))
    for strategy in (straight[1].trainer.strategy, module.trainer.strategy):
        strategy.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
