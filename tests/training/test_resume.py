"""Resuming in a fresh process equals an uninterrupted run bit for bit; state formats resume from each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.native.formats import STATE_FORMATS
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import assert_helpful, fit
from tests.training.worker import Outcome, Recorder, Run, launch, train

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


def trained(out: Path, state_format: str, *, recipe: Recipe = RECIPE, **settings: Any) -> tuple[list[float], Recorder]:
    run = Run(out=str(out), recipe=recipe, options={"state_format": state_format}, **settings)
    module, trainer, recorder = train(run)
    strategy: Any = trainer.strategy
    recorder.extra["bytes"] = strategy.state_bytes / strategy.state_numel
    strategy.close()
    return module.losses, recorder


@pytest.mark.parametrize(("state_format", "nbytes"), [("bf16", 8), ("int8", 6), ("int8_remainder", 6)])
def test_losses_follow_torch(state_format: str, nbytes: int, tmp_path: Path) -> None:
    """With groups, a scheduler, clipping and an unused parameter losses stay near torch's.

    The state takes two places of the format's size.
    """
    losses, recorder = trained(tmp_path, state_format)
    expected = torch.tensor(reference.train(RECIPE).losses)
    torch.testing.assert_close(torch.tensor(losses), expected, atol=3e-2, rtol=0)
    assert recorder.extra["state_entries"] == 0
    assert 2 * nbytes <= recorder.extra["bytes"] < 2 * nbytes + 3


def test_checkpoints_go_from_format_to_format(tmp_path: Path) -> None:
    """Each format resumes from the checkpoint of another one, and the losses stay near those of fp32."""
    expected, _ = trained(tmp_path / "fp32", "fp32", save_at=(2,))
    checkpoint = tmp_path / "fp32" / "step-2.ckpt"
    for step, state_format in enumerate(["int8_remainder", "bf16", "int8", "fp32"], start=3):
        out, recipe = tmp_path / state_format / "resumed", dataclasses.replace(RECIPE, max_steps=step)
        losses, _ = trained(out, state_format, recipe=recipe, resume=str(checkpoint), save_at=(step,))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[step - 1 : step]), atol=3e-2, rtol=0)
        checkpoint = out / f"step-{step}.ckpt"


def test_an_unknown_format(tmp_path: Path) -> None:
    """The error names those that the store writes."""
    with pytest.raises(ConfigError) as caught:
        SmartInfinityStrategy(tmp_path / "storage", state_format="int4")
    assert_helpful(caught.value, "'int4'", *STATE_FORMATS)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_remainders_need_bf16(precision: str, tmp_path: Path) -> None:
    """The error says what to use instead, and nothing is written."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", state_format="int8_remainder")
    with pytest.raises(ConfigError) as caught:
        fit(LitTiny(dataclasses.replace(RECIPE, precision=precision)), strategy, tmp_path, precision=precision)
    assert_helpful(caught.value, "'int8_remainder'", "bf16-mixed", "'int8'")
    assert not (tmp_path / "storage").exists()
