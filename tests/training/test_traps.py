"""Silent mistakes are refused, reported or made harmless."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_smartinfinity import CheckpointError, UnsupportedError
from tests.helpers import trainers
from tests.helpers.models import LitTiny, Recipe
from tests.training.worker import Run, train

RECIPE = Recipe(precision="bf16-mixed", max_steps=4)


def at(step: int, action: Callable[[Any, Any], object]) -> pl.Callback:
    """Return a callback that calls a function before a given step."""
    return LambdaCallback(
        on_train_batch_start=lambda trainer, module, *_: trainer.global_step == step and action(trainer, module)
    )


def fit(root: Path, module: LitTiny, *callbacks: pl.Callback, precision: Any = "bf16-mixed") -> pl.Trainer:
    """Fit for four steps."""
    return trainers.fit(module, root, max_steps=4, callbacks=list(callbacks), precision=precision)


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    """Optimizer states of one save beside model states of another, as after copying by hand, raise an error."""
    train(Run(out=str(tmp_path / "a"), recipe=RECIPE, save_at=(1, 2)))
    first, second = tmp_path / "a" / "step-1.ckpt", tmp_path / "a" / "step-2.ckpt"
    (states,) = first.rglob("*optim_states.pt")
    shutil.copy(states, second / states.relative_to(first))
    with pytest.raises(CheckpointError, match="different saves"):
        train(Run(out=str(tmp_path / "b"), recipe=RECIPE, resume=str(second)))


def test_saving_over_a_checkpoint_of_more_processes_leaves_only_the_new_one(tmp_path: Path) -> None:
    """Files of ranks and precisions that this run does not have are removed, and the result resumes."""
    path = tmp_path / "a.ckpt"
    run = Run(out=str(tmp_path / "a"), recipe=dataclasses.replace(RECIPE, max_steps=2), save_after_fit=str(path))
    train(run)
    (states,) = path.rglob("*optim_states.pt")
    (model,) = path.rglob("*model_states.pt")
    shutil.copy(states, states.with_name("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    shutil.copy(states, states.with_name("zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    shutil.copy(model, model.with_name("zero_pp_rank_1_mp_rank_00_model_states.pt"))
    train(run)
    assert sorted(path.rglob("*.pt")) == sorted([states, model])
    resumed, _, _ = train(Run(out=str(tmp_path / "b"), recipe=RECIPE, resume=str(path)))
    assert len(resumed.losses) == 2


def test_a_forked_child_leaves_the_state_alone(tmp_path: Path) -> None:
    """After os.fork() a child that exits normally leaves the parent's state on storage."""

    def fork(trainer: pl.Trainer, pl_module: Any) -> None:
        closer = trainer.strategy.optimizers[0].rank_state.closer()
        child = os.fork()
        if child == 0:
            closer()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    module = LitTiny(RECIPE)
    fit(tmp_path, module, at(2, fork))
    quiet = LitTiny(RECIPE)
    fit(tmp_path / "quiet", quiet)
    assert module.losses == quiet.losses


def test_unfreezing_in_mid_training_is_refused(tmp_path: Path) -> None:
    """A parameter that was frozen when the fit began has no state. torch would train it."""
    module = LitTiny(RECIPE)
    module.model.positions.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    thaw = at(2, lambda trainer, pl_module: pl_module.model.positions.weight.requires_grad_(True))
    with pytest.raises(UnsupportedError, match="positions"):
        fit(tmp_path, module, thaw)


def test_complex_parameters_are_refused(tmp_path: Path) -> None:
    """Casting the module would drop the imaginary parts."""
    module = LitTiny(RECIPE)
    module.rotations = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="rotations"):
        fit(tmp_path, module, precision="32-true")


class Nan(LitTiny):
    """A module whose losses are all NaN."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * float("nan")


def test_skipped_steps_are_reported_once(tmp_path: Path) -> None:
    """One warning says that the steps are skipped, and no step is committed."""
    with pytest.warns(UserWarning, match="NaN or infinite") as caught:
        trainer = fit(tmp_path, Nan(RECIPE))
    assert sum("NaN or infinite" in str(warning.message) for warning in caught) == 1
    assert trainer.strategy.optimizers[0].update.drained_handler().generation == 0
