"""Fabric and the engine itself load checkpoints of another form: universal ones, and those of other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CheckpointError
from tests.fabric.worker import Run, quiet_fabric, train
from tests.helpers.models import Recipe
from tests.helpers.resharding import as_of_another_number
from tests.helpers.universal import convert
from tests.training.worker import Outcome

RECIPE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), max_steps=2)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Outcome]:
    """Return a checkpoint of a loop's last step, and the loop's outcome."""
    outcome = train(Run(out=str(tmp_path / "a"), recipe=RECIPE, save_at=(2,)))
    return tmp_path / "a" / "step-2.ckpt", outcome


def set_up(root: Path) -> tuple[Any, Any, Any, Any]:
    fabric = quiet_fabric(root / "storage")
    module = RECIPE.build_model()
    model, optimizer = fabric.setup(module, RECIPE.build_optimizer(list(module.named_parameters())))
    return fabric, module, model, optimizer.engine


def test_fabric_loads_the_weights_of_a_universal_checkpoint_alone(saved: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Masters and parameters take the checkpoint's values, and step counts stay at zero."""
    path, outcome = saved
    fabric, module, model, engine = set_up(tmp_path)
    fabric.load(convert(path), {"model": model})
    for name, param in module.named_parameters():
        assert torch.equal(engine.optimizer.get_full_hp_param(param), outcome.masters[name]), name
        assert torch.equal(param.ds_tensor, outcome.masters[name].flatten()), name
    assert not engine.optimizer.update.drained_handler().steps.any()
    fabric.strategy.close()


def test_the_engine_loads_it_as_transformers_and_accelerate_ask(
    saved: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own method returns path and client state; it loads everything, or refuses to load a part."""
    path, outcome = saved
    fabric, module, _, engine = set_up(tmp_path)
    as_of_another_number(monkeypatch)
    with pytest.raises(CheckpointError, match="another number of processes") as caught:
        engine.load_checkpoint(str(path), load_module_only=True)
    assert "load_module_only" in caught.value.remedy
    assert engine.global_steps == 0
    found, client_state = engine.load_checkpoint(
        str(path), load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert (Path(found), client_state["step"], engine.global_steps) == (path / "checkpoint", 2, 2)
    assert engine.optimizer.update.drained_handler().steps.tolist() == outcome.extra["steps"]
    for name, param in module.named_parameters():
        assert torch.equal(engine.optimizer.get_full_hp_param(param), outcome.masters[name]), name
    fabric.strategy.close()
