"""Resuming in a fresh process equals an uninterrupted run bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.training.worker import Outcome, Run, launch

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
# Together the usual ones are all.
FEW, OTHERS = ["16-true"], ["32-true", "bf16-true", "bf16-mixed", "16-mixed"]
# Some precisions use a state format, since the format must not affect the resume.
FORMATS = {"16-true": "int8", "bf16-true": "int8_remainder", "16-mixed": "bf16"}


def assert_same(resumed: Outcome, straight: Outcome, *, first_loss: int) -> None:
    """Assert that losses from ``first_loss`` on, masters, counts, loss scale and rates are equal bit for bit."""
    assert resumed.losses == straight.losses[first_loss:]
    assert resumed.masters.keys() == straight.masters.keys()
    for name, master in straight.masters.items():
        assert torch.equal(resumed.masters[name], master), name
    for key in ("steps", "loss_scale", "lr"):
        assert resumed.extra[key] == straight.extra[key], key


@pytest.mark.parametrize(
    # One process with other precisions always runs in tests/fabric/test_training.py.
    ("devices", "precisions"),
    long_but([(2, FEW)], [(1, OTHERS), (2, FEW), (1, FEW), (2, OTHERS)]),
)
def test_resume_is_bit_exact_in_every_precision(devices: int, precisions: Sequence[str], tmp_path: Path) -> None:
    """A run that stops after three of six steps and resumes in new processes with another ring changes no bit.

    The run has parameter groups, a scheduler, clipping, accumulation, a parameter unused for some steps and, in fp16, a
    dynamic loss scale that skips the first steps.
    """
    runs = [_run(tmp_path / "straight" / precision, precision, devices, save_at=(3,)) for precision in precisions]
    straight = launch(*runs)
    resumed = launch(
        *(
            dataclasses.replace(
                run,
                out=run.out.replace("straight", "resumed"),
                save_at=(),
                resume=str(Path(run.out) / "step-3.ckpt"),
                transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
            )
            for run in runs
        )
    )
    for precision, a, b in zip(precisions, resumed, straight, strict=True):
        assert_same(a, b, first_loss=3 * runs[0].recipe.accumulate)
        if precision.startswith("16"):
            assert b.extra["skipped"], "no step overflowed"


def _run(out: Path, precision: str, devices: int, *, save_at: tuple[int, ...]) -> Run:
    recipe = Recipe(
        precision=precision,
        groups=True,
        scheduler="step",
        clip=0.5,
        accumulate=2,
        skip_side_at=(1, 2, 4),
        max_steps=6,
    )
    options: dict[str, Any] = {"initial_scale_power": 22, "hysteresis": 1} if precision.startswith("16") else {}
    options["state_format"] = FORMATS.get(precision, "fp32")
    return Run(out=str(out), recipe=recipe, devices=devices, save_at=save_at, options=options)


@pytest.mark.long  # as tests/training/test_two_processes.py has it for fewer precisions
def test_two_processes_train_like_one_torch_process(tmp_path: Path) -> None:
    """Two ranks equal plain torch on the batches of both."""
    from tests.helpers import reference
    from tests.training.test_parity import LOSS_TOLERANCE, MASTER_TOLERANCE

    base = Recipe(groups=True, scheduler="step", clip=0.5, skip_side_at=(1,), max_steps=5)
    recipes = [dataclasses.replace(base, precision=precision) for precision in PRECISIONS]
    outcomes = launch(
        *(
            Run(out=str(tmp_path / recipe.precision), recipe=recipe, devices=2, options=_static_scale(recipe))
            for recipe in recipes
        )
    )
    for recipe, outcome in zip(recipes, outcomes, strict=True):
        expected = reference.train(recipe, world_size=2)
        kind = recipe.precision.split("-")[0]
        torch.testing.assert_close(
            torch.tensor(outcome.losses), torch.tensor(expected.losses), atol=LOSS_TOLERANCE[kind], rtol=0
        )
        for name, master in expected.masters.items():
            torch.testing.assert_close(outcome.masters[name], master, atol=MASTER_TOLERANCE[kind], rtol=0)


def _static_scale(recipe: Recipe) -> dict[str, float]:
    return {"loss_scale": 2.0**10} if recipe.precision.startswith("16") else {}


def test_checkpoint_after_fit_resumes_like_one_during_it(tmp_path: Path) -> None:
    """A checkpoint saved after fit, over an older one at the same path, resumes as if training never stopped."""
    recipe = Recipe(precision="bf16-mixed", max_steps=6)
    (straight,) = launch(Run(out=str(tmp_path / "straight"), recipe=recipe))
    path = str(tmp_path / "after.ckpt")
    short = dataclasses.replace(recipe, max_steps=3)
    launch(
        Run(out=str(tmp_path / "shorter"), recipe=dataclasses.replace(short, max_steps=1), save_after_fit=path),
        Run(out=str(tmp_path / "short"), recipe=short, save_after_fit=path),
    )
    (resumed,) = launch(Run(out=str(tmp_path / "resumed"), recipe=recipe, resume=path))
    assert_same(resumed, straight, first_loss=3)
