"""Loss curves of smart_infinity and of plain torch for every precision, on one and two processes, as a table.

    python -m tests.training.parity_table --steps 50

The reference is ``tests/helpers/reference.py``. For 32-true on two processes Lightning's own DDP is run as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.helpers import reference
from tests.helpers.models import Recipe
from tests.training.worker import Run, launch

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]


def main() -> None:
    """Train, compare and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    print("| precision | processes | losses at steps 1, n/2, n | by torch | max difference of a loss | of a master |")
    print("|---|---|---|---|---|---|")
    base = Recipe(groups=True, scheduler="step", clip=1.0, lr=3e-3, width=64, max_steps=steps, batch_size=4)
    recipes = [dataclasses.replace(base, precision=precision) for precision in PRECISIONS]
    for devices in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            runs = [_run(Path(folder), recipe, devices) for recipe in recipes]
            outcomes = launch(*runs)
            ddp = launch(dataclasses.replace(runs[0], strategy="ddp", out=f"{folder}/ddp"))[0] if devices == 2 else None
        for recipe, outcome in zip(recipes, outcomes, strict=True):
            expected = reference.train(recipe, world_size=devices)
            print(_row(recipe.precision, devices, outcome.losses, expected.losses, outcome.masters, expected.masters))
        if ddp is not None:
            print(_row("32-true, Lightning ddp", 2, outcomes[0].losses, ddp.losses, outcomes[0].masters, ddp.masters))


def _run(folder: Path, recipe: Recipe, devices: int) -> Run:
    # In 16 bit DeepSpeed's own linear rounds once more, because it adds the bias after the product. This uses torch's.
    options: dict[str, Any] = {"zero": {"memory_efficient_linear": False}}
    if recipe.precision.startswith("16"):
        options["loss_scale"] = 2.0**10
    return Run(out=str(folder / recipe.precision), recipe=recipe, devices=devices, options=options)


def _row(
    name: str,
    devices: int,
    ours: list[float],
    theirs: list[float],
    masters: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
) -> str:
    shown = [0, len(ours) // 2, len(ours) - 1]
    loss_gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    master_gap = max(float((masters[key] - expected[key]).abs().max()) for key in expected)
    curves = " | ".join(", ".join(f"{losses[i]:.5f}" for i in shown) for losses in (ours, theirs))
    return f"| {name} | {devices} | {curves} | {loss_gap:.1e} | {master_gap:.1e} |"


if __name__ == "__main__":
    main()
