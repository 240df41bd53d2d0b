"""Gradients of several micro-batches are added in fp32, or as plain torch does, in the parameters' dtype."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ConfigError, TransferConfig
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.worker import Run, launch, train

RECIPE = Recipe(precision="bf16-true", accumulate=4, clip=0.3, groups=True, skip_side_at=(1,), max_steps=4)
PRECISIONS = ["bf16-true", "bf16-mixed", "16-true", "16-mixed"]


def run_of(out: Path, recipe: Recipe, *, accumulate_in: str, **settings: Any) -> Run:
    options = {"loss_scale": 2.0**10} if recipe.precision.startswith("16") else {}
    transfer = {**SMALL_RING, "accumulate_in": accumulate_in, **settings.pop("transfer", {})}
    return Run(out=str(out), recipe=recipe, transfer=transfer, options={**options, **settings.pop("options", {})})


def farthest(masters: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two trainings' masters."""
    return max(float((masters[name] - other).abs().max()) for name, other in others.items())


@pytest.mark.parametrize(
    ("precision", "devices"),
    long_but([("bf16-true", 2), ("16-mixed", 1)], itertools.product(PRECISIONS, [1, 2])),
)
def test_added_in_the_dtype_of_the_parameters(
    precision: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters follow plain torch's, whose gradients have the parameters' dtype, and not those of sums in fp32.

    Each micro-batch is reduced over the ranks first, then added.
    """
    recipe = dataclasses.replace(RECIPE, precision=precision)
    # DeepSpeed's own linear rounds once more in 16 bit, and stays in place in a process that has trained with it.
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    run = run_of(tmp_path, recipe, accumulate_in="parameters", options={"zero": {"memory_efficient_linear": False}})
    (outcome,) = launch(dataclasses.replace(run, devices=devices))
    expected = reference.train(recipe, world_size=devices, accumulate_in="parameters")
    in_fp32 = reference.train(recipe, world_size=devices)
    difference = farthest(expected.masters, in_fp32.masters)
    assert difference > 0
    assert farthest(outcome.masters, expected.masters) < 0.5 * difference


def test_it_takes_half_of_the_memory(tmp_path: Path) -> None:
    """The gradients' memory is that of one micro-batch."""
    held = {}
    for name in ("fp32", "parameters"):
        _, trainer, _ = train(run_of(tmp_path / name, dataclasses.replace(RECIPE, max_steps=1), accumulate_in=name))
        held[name] = trainer.strategy.host_bytes["gradient_arena"]  # type: ignore[attr-defined]
        trainer.strategy.close()  # type: ignore[attr-defined]
    assert held["fp32"] == 2 * held["parameters"]


@pytest.mark.parametrize("overlap", long_but(["backward"], ["forward", "backward"]))
def test_no_bit_depends_on_overlap_or_budget(overlap: str, tmp_path: Path) -> None:
    """With updates beside backward, and with most gradients on storage, which later micro-batches add to."""
    recipe = dataclasses.replace(RECIPE, clip=None, width=64, depth=2)
    bucket = {"zero": {"reduce_bucket_size": 4000}}
    runs = {
        out: run_of(
            tmp_path / out,
            recipe,
            accumulate_in="parameters",
            transfer=transfer,
            options={**bucket, "overlap": of_run},
        )
        for out, of_run, transfer in (("none", "none", {}), ("budget", overlap, {"gradient_bytes": 96 << 10}))
    }
    assert_same(result(runs["budget"]), result(runs["none"]))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accumulate_in='bf16'\) is unknown. Use one of: 'fp32', 'parameters'"):
        TransferConfig(accumulate_in="bf16")
