"""Fabric loads universal checkpoints with or without the optimizer."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.fabric.worker import Run, quiet_fabric, train
from tests.helpers.models import Recipe
from tests.helpers.universal import convert

RECIPE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), max_steps=4)


def test_fabric_resumes_from_a_universal_checkpoint_to_the_bit(tmp_path: Path) -> None:
    """Losses, masters, step counts and the user's own state equal those of an uninterrupted loop."""
    straight = train(Run(out=str(tmp_path / "a"), recipe=RECIPE, save_at=(2,)))
    universal = convert(tmp_path / "a" / "step-2.ckpt")
    resumed = train(Run(out=str(tmp_path / "b"), recipe=RECIPE, resume=str(universal)))
    assert resumed.losses == straight.losses[2:]
    assert resumed.extra["steps"] == straight.extra["steps"]
    for name, master in straight.masters.items():
        assert torch.equal(resumed.masters[name], master), name


def test_fabric_loads_the_weights_of_a_universal_checkpoint_alone(tmp_path: Path) -> None:
    """Masters and parameters take the checkpoint's values, and step counts stay at zero."""
    saved = train(Run(out=str(tmp_path / "a"), recipe=RECIPE, save_at=(4,)))
    fabric = quiet_fabric(tmp_path / "storage")
    module = RECIPE.build_model()
    model, optimizer = fabric.setup(module, RECIPE.build_optimizer(list(module.named_parameters())))
    fabric.load(convert(tmp_path / "a" / "step-4.ckpt"), {"model": model})
    inner = optimizer.engine.optimizer
    for name, param in module.named_parameters():
        assert torch.equal(inner.get_full_hp_param(param), saved.masters[name]), name
        assert torch.equal(param.ds_tensor, saved.masters[name].flatten()), name
    assert not inner.update.drained_handler().steps.any()
    fabric.strategy.close()
