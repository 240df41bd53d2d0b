"""Where nobody tells before a backward that a step follows it, no update begins within backward."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.fabric.worker import quiet_fabric
from tests.helpers.models import Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.test_loop_manual import Manual

RECIPE = Recipe(precision="bf16-mixed", depth=1, max_steps=9)


@dataclasses.dataclass
class Trained:
    """The modes of a training's steps, its losses, its masters, the number of its guesses, and its warnings."""

    modes: list[str]
    losses: list[float]
    masters: list[Any]
    num_adopted: int
    warned: list[str]


def in_fabric(root: Path, overlap: str, *, tells: bool = False) -> Trained:
    """Train in a loop of Fabric; ``tells`` is whether it tells of each step before its backward."""
    fabric: Any = quiet_fabric(root, precision=RECIPE.precision, options={"overlap": overlap})
    module = RECIPE.build_model()
    model, optimizer = fabric.setup(module, RECIPE.build_optimizer(list(module.named_parameters())))
    trained = optimizer.engine.optimizer
    modes, losses = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(RECIPE.max_steps):
            loss = model(RECIPE.batch(step))
            losses.append(float(loss.detach()))
            if tells:
                optimizer.engine.set_gradient_accumulation_boundary(True)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            modes.append(trained.overlap.mode)
    return ended(fabric.strategy, trained, module, modes, losses, caught)


def by_hand(root: Path, overlap: str) -> Trained:
    """Train in a Trainer, in manual optimization."""
    module = Manual()
    modes: list[str] = []
    module.on_train_batch_end = lambda *_: modes.append(trainer.strategy.optimizers[0].overlap.mode)  # type: ignore[method-assign]
    trainer = quiet_trainer(root, overlap=overlap, max_steps=RECIPE.max_steps, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return ended(trainer.strategy, trainer.strategy.optimizers[0], module, modes, module.losses, caught)


def ended(strategy: Any, optimizer: Any, module: Any, modes: list[str], losses: list[float], caught: Any) -> Trained:
    masters = [optimizer.get_full_hp_param(param).tolist() for param in module.parameters()]
    warned = [str(warning.message) for warning in caught if "overlap=" in str(warning.message)]
    num_adopted = optimizer.speculation.num_adopted
    strategy.close()
    return Trained(modes, losses, masters, num_adopted, warned)


@pytest.mark.parametrize("train", [in_fabric, by_hand])
def test_backward(train: Any, tmp_path: Path) -> None:
    """A warning says once why no update begins within backward. The bits are the same. ``auto`` tries nothing."""
    auto, trained = train(tmp_path / "auto", "auto"), train(tmp_path / "backward", "backward")
    assert set(auto.modes) == {"forward"}
    (warning,) = trained.warned
    assert "works as 'forward': no caller announces before a backward that a step follows it" in warning
    assert trained.num_adopted == 0
    assert (trained.losses, trained.masters) == (auto.losses, auto.masters)


def test_a_loop_in_fabric_that_tells(tmp_path: Path) -> None:
    """With DeepSpeed's call before each backward ``auto`` tries it, and updates begin within backward."""
    auto = in_fabric(tmp_path / "auto", "auto", tells=True)
    assert auto.modes[4:8] == 4 * ["backward"] and auto.num_adopted >= 3
    backward = in_fabric(tmp_path / "backward", "backward", tells=True)
    assert (backward.num_adopted, backward.warned) == (RECIPE.max_steps, [])
    assert (auto.losses, auto.masters) == (backward.losses, backward.masters)
