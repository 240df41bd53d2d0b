"""Every state format trains, resumes to the bit, and goes on from any other's checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.settings import check_choices
from lightning_smartinfinity.store.extents import STATE_FORMATS
from tests.helpers import reference
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import assert_helpful, fit
from tests.training.worker import Recorder, Run, train

FORMATS = ["bf16", "int8", "int8_remainder"]
RECIPE = Recipe(precision="bf16-mixed", groups=True, scheduler="step", clip=0.5, skip_side_at=(1,), max_steps=6)
OTHER_RING = {"tasklet_bytes": 64 * 1024, "num_buffers": 3}


def trained(
    out: Path, state_format: str, *, recipe: Recipe = RECIPE, zero: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[float], Recorder]:
    options: dict[str, Any] = {"state_format": state_format, **({"zero": zero} if zero else {})}
    module, trainer, recorder = train(Run(out=str(out), recipe=recipe, options=options, **settings))
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module.losses, recorder


def test_settings_know_every_format() -> None:
    """What the strategies take is what the store writes."""
    for name in STATE_FORMATS:
        check_choices(state_format=name)
    with pytest.raises(ConfigError) as caught:
        check_choices(state_format="int4")
    assert_helpful(caught.value, "'int4'", *STATE_FORMATS)


@pytest.mark.parametrize("state_format", FORMATS)
def test_resume_is_bit_exact(state_format: str, tmp_path: Path) -> None:
    """Losses are near torch's; stopped after three steps and resumed with another ring, nothing differs."""
    losses, recorder = trained(tmp_path / "straight", state_format, save_at=(3,))
    checkpoint = str(tmp_path / "straight" / "step-3.ckpt")
    resumed, again = trained(tmp_path / "resumed", state_format, resume=checkpoint, transfer=OTHER_RING)
    assert resumed == losses[3:]
    for name, master in recorder.masters.items():
        assert torch.equal(again.masters[name], master), name
    expected = reference.train(RECIPE).losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=3e-2, rtol=0)
    assert losses[-1] < losses[0]


def test_checkpoints_go_from_format_to_format(tmp_path: Path) -> None:
    """Each format goes on from the checkpoint of the one before, and the losses stay near those of fp32 alone."""
    expected, _ = trained(tmp_path / "fp32", "fp32", save_at=(2,))
    checkpoint = tmp_path / "fp32" / "step-2.ckpt"
    for step, state_format in enumerate(["int8_remainder", "bf16", "int8", "fp32"], start=3):
        out, recipe = tmp_path / state_format / "resumed", dataclasses.replace(RECIPE, max_steps=step)
        losses, _ = trained(out, state_format, recipe=recipe, resume=str(checkpoint), save_at=(step,))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[step - 1 : step]), atol=3e-2, rtol=0)
        checkpoint = out / f"step-{step}.ckpt"


def test_parameters_on_storage_give_the_same_bits(tmp_path: Path) -> None:
    """The remainder's other half is the slot's where parameters are not in memory."""
    zero = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
    losses, recorder = trained(tmp_path / "memory", "int8_remainder")
    stored, other = trained(tmp_path / "nvme", "int8_remainder", zero=zero)
    assert stored == losses
    for name, master in recorder.masters.items():
        assert torch.equal(other.masters[name], master), name


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_remainders_need_bf16(precision: str, tmp_path: Path) -> None:
    """Before anything is written, with what to use instead."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", state_format="int8_remainder")
    with pytest.raises(ConfigError) as caught:
        fit(LitTiny(dataclasses.replace(RECIPE, precision=precision)), strategy, tmp_path, precision=precision)
    assert_helpful(caught.value, "'int8_remainder'", "bf16-mixed", "'int8'")
    assert not (tmp_path / "storage").exists()
