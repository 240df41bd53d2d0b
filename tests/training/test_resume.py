"""Resuming in a fresh process equals an uninterrupted run bit for bit; state formats resume from each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import assert_helpful, fit
from tests.training.worker import Outcome, Run, launch, train

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
    """A run that stops after three of six steps and resumes changes no bit, with other rings, sub-groups and buckets.

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
                options={**run.options, "zero": {"sub_group_size": 3000, "reduce_bucket_size": 2000}},
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


RECIPE = Recipe(precision="bf16-mixed", groups=True, scheduler="step", clip=0.5, skip_side_at=(1,), max_steps=6)


NUM_BYTES = [("fp32", 12), ("int8_remainder", 6), ("bf16", 8), ("int8", 6), ("fp32", 12)]


def test_checkpoints_go_from_format_to_format(tmp_path: Path) -> None:
    """Each format resumes from the checkpoint of another one, and with each the losses stay near torch's.

    The run has groups, a scheduler, clipping and an unused parameter. The state takes two places of the format's size.
    """
    recipe = dataclasses.replace(RECIPE, max_steps=10)
    expected, found, checkpoint = torch.tensor(reference.train(recipe).losses), list[float](), None
    for step, (state_format, nbytes) in enumerate(NUM_BYTES, start=1):
        out, recipe = tmp_path / f"{step}", dataclasses.replace(RECIPE, max_steps=2 * step)
        run = Run(out=str(out), recipe=recipe, options={"state_format": state_format}, resume=checkpoint)
        module, trainer, recorder = train(dataclasses.replace(run, save_at=(2 * step,)))
        strategy: Any = trainer.strategy
        assert 2 * nbytes <= strategy.state_bytes / strategy.state_numel < 2 * nbytes + 3
        assert recorder.extra["state_entries"] == 0
        strategy.close()
        found += module.losses
        checkpoint = str(out / f"step-{2 * step}.ckpt")
    torch.testing.assert_close(torch.tensor(found), expected, atol=3e-2, rtol=0)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_remainders_need_bf16(precision: str, tmp_path: Path) -> None:
    """The error says what to use instead, and nothing is written."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", state_format="int8_remainder")
    with pytest.raises(ConfigError) as caught:
        fit(LitTiny(dataclasses.replace(RECIPE, precision=precision)), strategy, tmp_path, precision=precision)
    assert_helpful(caught.value, "'int8_remainder'", "bf16-mixed", "'int8'")
    assert not (tmp_path / "storage").exists()
