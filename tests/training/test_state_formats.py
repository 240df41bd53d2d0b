"""Every state format trains and resumes from another format's checkpoint. See also test_resume.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.settings.strategy import StrategySettings
from tests.helpers import reference
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import assert_helpful, fit
from tests.training.worker import Recorder, Run, train

FORMATS = ["bf16", "int8", "int8_remainder"]
RECIPE = Recipe(precision="bf16-mixed", groups=True, scheduler="step", clip=0.5, skip_side_at=(1,), max_steps=6)


def trained(
    out: Path, state_format: str, *, recipe: Recipe = RECIPE, zero: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[float], Recorder]:
    options: dict[str, Any] = {"state_format": state_format, **({"zero": zero} if zero else {})}
    module, trainer, recorder = train(Run(out=str(out), recipe=recipe, options=options, **settings))
    strategy: Any = trainer.strategy
    recorder.extra["bytes"] = strategy.state_bytes / strategy.state_numel
    strategy.close()
    return module.losses, recorder


def test_settings_know_every_format() -> None:
    """The strategies accept the state formats that the store writes."""
    for name in STATE_FORMATS:
        StrategySettings(state_format=name)
    with pytest.raises(ConfigError) as caught:
        StrategySettings(state_format="int4")
    assert_helpful(caught.value, "'int4'", *STATE_FORMATS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], Recorder]]:
    """Train once with every format."""
    return {name: trained(tmp_path_factory.mktemp(name), name) for name in FORMATS}


def test_losses_follow_torch(alone: dict[str, tuple[list[float], Recorder]]) -> None:
    """With groups, a scheduler, clipping and an unused parameter losses stay near torch's.

    The state takes two places of the format's size.
    """
    expected = torch.tensor(reference.train(RECIPE).losses)
    for name, (losses, recorder) in alone.items():
        torch.testing.assert_close(torch.tensor(losses), expected, atol=3e-2, rtol=0, msg=name)
        assert recorder.extra["state_entries"] == 0
        nbytes = 2 * (8 if name == "bf16" else 6)
        assert nbytes <= recorder.extra["bytes"] < nbytes + 3, name


def test_checkpoints_go_from_format_to_format(tmp_path: Path) -> None:
    """Each format resumes from the checkpoint of another one, and the losses stay near those of fp32."""
    expected, _ = trained(tmp_path / "fp32", "fp32", save_at=(2,))
    checkpoint = tmp_path / "fp32" / "step-2.ckpt"
    for step, state_format in enumerate(["int8_remainder", "bf16", "int8", "fp32"], start=3):
        out, recipe = tmp_path / state_format / "resumed", dataclasses.replace(RECIPE, max_steps=step)
        losses, _ = trained(out, state_format, recipe=recipe, resume=str(checkpoint), save_at=(step,))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[step - 1 : step]), atol=3e-2, rtol=0)
        checkpoint = out / f"step-{step}.ckpt"


def test_parameters_on_storage_give_the_same_bits(
    alone: dict[str, tuple[list[float], Recorder]], tmp_path: Path
) -> None:
    """The remainder format gives the same bits where parameters are on storage instead of in memory."""
    zero = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
    losses, recorder = alone["int8_remainder"]
    stored, other = trained(tmp_path, "int8_remainder", zero=zero)
    assert stored == losses
    for name, master in recorder.masters.items():
        assert torch.equal(other.masters[name], master), name


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_remainders_need_bf16(precision: str, tmp_path: Path) -> None:
    """The error says what to use instead, and nothing is written."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", state_format="int8_remainder")
    with pytest.raises(ConfigError) as caught:
        fit(LitTiny(dataclasses.replace(RECIPE, precision=precision)), strategy, tmp_path, precision=precision)
    assert_helpful(caught.value, "'int8_remainder'", "bf16-mixed", "'int8'")
    assert not (tmp_path / "storage").exists()
