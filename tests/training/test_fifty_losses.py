"""Fifty losses of a training with budgets for gradients, parameters and activations, and of one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.worker import Run, train

STORED: dict[str, Any] = {
    "overlap": "auto",
    "zero": {"offload_param": {"device": "nvme"}, "reduce_bucket_size": 4000},
    "activations": EVERYTHING,
}
BUDGETS = {"gradient_bytes": 200_000, "parameter_bytes": 200_000}


@pytest.mark.parametrize(("steps", "clip"), long_but([(20, 0.3)], [(20, 0.3), (50, 0.3), (50, None)]))
def test_fifty_losses(steps: int, clip: float | None, tmp_path: Path) -> None:
    """Losses and masters are the same to the bit, with all budgets at once and the overlap that is chosen meanwhile."""
    recipe = Recipe(precision="bf16-true", width=64, depth=2, clip=clip, scheduler="step", max_steps=steps)
    runs = [
        Run(out=str(tmp_path / "memory"), recipe=recipe, transfer=SMALL_RING, options={"overlap": "none"}),
        Run(out=str(tmp_path / "budgets"), recipe=recipe, transfer={**SMALL_RING, **BUDGETS}, options=STORED),
    ]
    in_memory = result(runs[0])
    module, trainer, recorder = train(runs[1])
    strategy: Any = trainer.strategy
    assert strategy.optimizers[0].rank_state.arena.counters() is not None, "all gradients fit into memory"
    assert strategy.parameter_bytes > 0 and strategy.traffic().activation_read_bytes > 0
    with_budgets = ((module.losses, module.validated, recorder.extra), recorder.masters)
    strategy.close()
    assert len(in_memory[0][0]) == steps and in_memory[0][0][0] != in_memory[0][0][-1]
    assert_same(with_budgets, in_memory)
