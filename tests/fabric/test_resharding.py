"""Fabric and the engine itself load ordinary checkpoints of another number of processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lightning_smartinfinity import CheckpointError
from tests.fabric.worker import Run, launch, quiet_fabric
from tests.helpers.models import Recipe

RECIPE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), max_steps=4)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that two processes saved after two steps."""
    folder = tmp_path_factory.mktemp("two")
    launch(Run(out=str(folder), recipe=dataclasses.replace(RECIPE, max_steps=2), devices=2, save_at=(2,)))
    return folder / "step-2.ckpt"


def test_the_engine_loads_it_as_transformers_and_accelerate_ask(two: Path, tmp_path: Path) -> None:
    """The engine's own method returns path and client state; it loads everything, or refuses to load a part."""
    fabric = quiet_fabric(tmp_path / "storage")
    module = RECIPE.build_model()
    _, optimizer = fabric.setup(module, RECIPE.build_optimizer(list(module.named_parameters())))
    engine = optimizer.engine
    with pytest.raises(CheckpointError, match="another number of processes") as caught:
        engine.load_checkpoint(str(two), load_module_only=True)
    assert "load_module_only" in caught.value.remedy
    assert engine.global_steps == 0
    path, client_state = engine.load_checkpoint(
        str(two), load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert Path(path) == two / "checkpoint"
    assert client_state["step"] == 2
    assert engine.global_steps == 2 and max(engine.optimizer.update.drained_handler().steps) == 2
    fabric.strategy.close()
