"""On a GPU no setting changes a bit: when updates run, where gradients and parameters lie, how late transfers end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import Recipe
from tests.helpers.runif import RunIf
from tests.training.test_overlap import CASES
from tests.training.worker import Run, launch

pytestmark = RunIf(cuda_devices=1)

# Gradients leave during backward about one layer at a time, and a tasklet holds about two layers.
SMALL = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
BUCKET = {"reduce_bucket_size": 4000}
BUDGET = {"gradient_bytes": 192 << 10}
SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {"overlap": "forward"},
    "backward": {"overlap": "backward"},
    "auto": {"overlap": "auto"},
    "gradients on storage": {"overlap": "none", "transfer": BUDGET},
    "gradients on storage, forward": {"overlap": "forward", "transfer": BUDGET},
    "large ring": {"overlap": "none", "transfer": {"tasklet_bytes": 256 * 1024, "num_buffers": 4}},
    "DRAM tier": {"overlap": "forward", "transfer": {"dram_cache_bytes": 100_000, "durability": "power"}},
}


def run_of(out: Path, name: str, *, overlap: str, delays: int | None, transfer: dict[str, Any]) -> Run:
    recipe, options = CASES[name]
    return Run(
        out=str(out),
        recipe=dataclasses.replace(recipe, width=64, depth=2),
        accelerator="cuda",
        deterministic=True,
        delays=delays,
        transfer={**SMALL, **transfer},
        options={**options, "overlap": overlap, "zero": {**BUCKET, **options.get("zero", {})}},
    )


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, tmp_path: Path) -> None:
    """Losses, masters, skipped steps, loss scale and step counts are those of a training without overlap."""
    runs = [run_of(tmp_path / "straight", name, overlap="none", delays=None, transfer={})]
    for seed, (setting, options) in enumerate(SETTINGS.items()):
        runs.append(run_of(tmp_path / setting, name, delays=seed, **{"transfer": {}, **options}))
    straight, *others = launch(*runs)
    assert straight.masters
    for setting, outcome in zip(SETTINGS, others, strict=True):
        # As text, NaNs are equal.
        assert repr((outcome.losses, outcome.extra)) == repr((straight.losses, straight.extra)), setting
        assert outcome.masters.keys() == straight.masters.keys()
        for parameter, master in straight.masters.items():
            assert torch.equal(outcome.masters[parameter], master), (setting, parameter)


def test_gradients_that_are_given_up(tmp_path: Path) -> None:
    """Steps that nothing but their update can follow, with a budget of gradients and several layers."""
    recipe = Recipe(precision="bf16-true", depth=4, width=48, max_steps=6)
    runs = [
        Run(
            out=str(tmp_path / setting),
            recipe=recipe,
            accelerator="cuda",
            deterministic=True,
            transfer={**SMALL, **transfer},
            options={"overlap": overlap, "zero": BUCKET},
        )
        for setting, overlap, transfer in (
            ("straight", "none", {}),
            ("budget", "backward", {"gradient_bytes": 96 << 10}),
        )
    ]
    straight, budget = launch(*runs)
    assert repr((budget.losses, budget.extra)) == repr((straight.losses, straight.extra))
    assert all(torch.equal(budget.masters[name], master) for name, master in straight.masters.items())


def test_updates_begin_within_backward(tmp_path: Path) -> None:
    """With parameters on the device every step of a plain loop keeps the update that began within its backward."""
    recipe = Recipe(precision="bf16-true", depth=4, width=256, max_steps=6, accumulate=2)
    run = Run(out=str(tmp_path), recipe=recipe, accelerator="cuda", transfer=SMALL, options={"overlap": "backward"})
    (outcome,) = launch(run, worker="tests.training.guesses_worker")
    assert outcome.extra["outputs"] == "CudaPartition"
    assert (outcome.extra["adopted"], outcome.extra["discarded"]) == (recipe.max_steps, 0)
