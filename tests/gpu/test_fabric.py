"""A Fabric loop on a CUDA device, in processes of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.fabric.worker import Run, launch
from tests.helpers import reference
from tests.helpers.models import Recipe
from tests.helpers.runif import RunIf

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]


@RunIf(cuda_devices=1)
def test_every_precision_trains_like_torch_in_fabric_on_a_gpu(tmp_path: Path) -> None:
    """A loop that accumulates and clips has losses that follow plain torch's on the CPU."""
    base = Recipe(groups=True, scheduler="step", clip=0.5, accumulate=2, skip_side_at=(1,))
    runs = []
    for precision in PRECISIONS:
        options = {"loss_scale": 2.0**10} if precision.startswith("16") else {}
        recipe = dataclasses.replace(base, precision=precision)
        runs.append(Run(out=str(tmp_path / precision), recipe=recipe, accelerator="cuda", options=options))
    for run, outcome in zip(runs, launch(*runs), strict=True):
        expected = torch.tensor(reference.train(run.recipe).losses)
        tolerance = 2e-3 if run.recipe.precision == "32-true" else 5e-2
        torch.testing.assert_close(torch.tensor(outcome.losses), expected, atol=tolerance, rtol=0, msg=run.out)
