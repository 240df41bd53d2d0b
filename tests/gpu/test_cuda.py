"""Training on a CUDA device: parameters leave by tasklet, gradients arrive in registered memory.

Every run has a process of its own, because DeepSpeed chooses CPU or CUDA once per process and other tests choose the
CPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.helpers import reference
from tests.helpers.models import Recipe
from tests.helpers.runif import RunIf
from tests.training.worker import Run, launch

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]


@RunIf(cuda_devices=1)
def test_every_precision_trains_like_torch_on_a_gpu(tmp_path: Path) -> None:
    """Losses follow plain torch's on the CPU, up to the differences between two matrix libraries."""
    base = Recipe(groups=True, scheduler="step", clip=0.5, accumulate=2, skip_side_at=(1,))
    recipes = [dataclasses.replace(base, precision=precision) for precision in PRECISIONS]
    outcomes = launch(*(_run(tmp_path / recipe.precision, recipe) for recipe in recipes))
    for recipe, outcome in zip(recipes, outcomes, strict=True):
        expected = torch.tensor(reference.train(recipe).losses)
        tolerance = 2e-3 if recipe.precision == "32-true" else 5e-2
        torch.testing.assert_close(torch.tensor(outcome.losses), expected, atol=tolerance, rtol=0, msg=recipe.precision)


@RunIf(cuda_devices=1)
def test_resume_on_a_gpu_is_bit_exact(tmp_path: Path) -> None:
    """A run resumed in a new process with another ring equals an uninterrupted one bit for bit."""
    recipe = Recipe(precision="bf16-mixed", groups=True, scheduler="step", clip=0.5, max_steps=6)
    straight = _run(tmp_path / "straight", recipe, save_at=(3,), deterministic=True)
    resumed = _run(
        tmp_path / "resumed",
        recipe,
        resume=str(tmp_path / "straight" / "step-3.ckpt"),
        transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
        deterministic=True,
    )
    (a,) = launch(straight)
    (b,) = launch(resumed)
    assert b.losses == a.losses[3:]
    assert all(torch.equal(a.masters[name], b.masters[name]) for name in a.masters)


@RunIf(cuda_devices=2)
def test_two_gpus_split_the_state(tmp_path: Path) -> None:
    """Two ranks on two devices follow plain torch on the batches of both."""
    recipe = Recipe(precision="bf16-mixed", max_steps=4)
    (outcome,) = launch(dataclasses.replace(_run(tmp_path, recipe), devices=2))
    expected = torch.tensor(reference.train(recipe, world_size=2).losses)
    torch.testing.assert_close(torch.tensor(outcome.losses), expected, atol=5e-2, rtol=0)


def _run(out: Path, recipe: Recipe, **settings: object) -> Run:
    options = {"loss_scale": 2.0**10} if recipe.precision.startswith("16") else {}
    run = Run(out=str(out), recipe=recipe, accelerator="cuda", options=options)
    return dataclasses.replace(run, **settings)  # type: ignore[arg-type]
