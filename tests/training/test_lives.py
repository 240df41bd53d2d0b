"""Several fits in a row, and validation, tests and checkpoints after a fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_smartinfinity import StorageError, UnsupportedError
from tests.helpers import native_testing as testing
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.stock.systems import Hook
from tests.training.test_bad_input import assert_helpful
from tests.training.worker import Run, train

RECIPE = Recipe(precision="bf16-mixed", max_steps=3)


class Evaluated(LitTiny):
    """A module that can be validated and tested."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.model(batch))

    test_step = validation_step

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return self.recipe.loader()

    test_dataloader = val_dataloader


def test_one_trainer_fits_twice(tmp_path: Path) -> None:
    """The second fit continues from the first one's weights with a new optimizer, as in Lightning."""
    trainer = quiet_trainer(tmp_path)
    module = LitTiny(RECIPE)
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module)
    assert trainer.global_step == 6
    assert module.losses[3] < module.losses[0]
    assert trainer.strategy.traffic().steps == 3
    trainer.strategy.close()
    assert not list(tmp_path.rglob("*.bin"))


def test_evaluation_of_a_checkpoint_in_a_fresh_trainer(tmp_path: Path) -> None:
    """Both validate and test load a checkpoint's masters and give the loss of the fitted model."""
    trainer = quiet_trainer(tmp_path, limit_val_batches=1.0)
    module = Evaluated(RECIPE)
    trainer.fit(module)
    expected = trainer.validate(module, verbose=False)[0]["loss"]
    trainer.save_checkpoint(tmp_path / "fitted.ckpt")
    fresh = quiet_trainer(tmp_path / "fresh", limit_val_batches=1.0)
    for evaluate in (fresh.validate, fresh.test):
        (result,) = evaluate(Evaluated(RECIPE), ckpt_path=str(tmp_path / "fitted.ckpt"), verbose=False)
        assert result["loss"] == pytest.approx(expected, abs=1e-6)


def test_saving_where_nothing_was_trained_is_refused(tmp_path: Path) -> None:
    """After an evaluation alone there is no state to save, and nothing is written."""
    trainer = quiet_trainer(tmp_path)
    trainer.validate(LitTiny(Recipe(validate=True)), verbose=False)
    with pytest.raises(UnsupportedError, match="trained nothing") as caught:
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert caught.value.remedy.endswith(".")
    assert not (tmp_path / "x.ckpt").exists()


def test_saving_after_a_validation_that_followed_the_fit(tmp_path: Path) -> None:
    """Validation replaces the engine. A checkpoint saved afterwards still holds the optimizer's state."""
    straight, _, a = train(Run(out=str(tmp_path / "straight"), recipe=dataclasses.replace(RECIPE, max_steps=5)))
    trainer = quiet_trainer(tmp_path, limit_val_batches=1.0)
    module = Evaluated(RECIPE)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    again = Run(
        out=str(tmp_path / "again"),
        recipe=dataclasses.replace(RECIPE, max_steps=5),
        resume=str(tmp_path / "late.ckpt"),
    )
    resumed, _, b = train(again)
    assert resumed.losses == straight.losses[3:]
    assert all(torch.equal(a.masters[name], b.masters[name]) for name in a.masters)


def test_with_one_place_a_failed_step_loses_the_state_and_says_so(tmp_path: Path) -> None:
    """With durability="none" a failed step raises, and saving afterwards raises instead of saving mixed steps."""

    def fail(trainer: Any) -> None:
        testing.inject(trainer.strategy.optimizers[0].update.drained_handler()._device._pipeline, fail_write_at=0)

    trainer = quiet_trainer(tmp_path, transfer={"durability": "none"}, callbacks=[Hook(1, fail)])
    with pytest.raises(StorageError):
        trainer.fit(LitTiny(RECIPE))
    with pytest.raises(StorageError, match="durability"):
        trainer.save_checkpoint(tmp_path / "lost.ckpt")


@pytest.mark.parametrize("use", long_but(["fit"], ["validate", "fit"]))
def test_a_module_in_a_fit_is_not_given_to_another_trainer(use: str, tmp_path: Path) -> None:
    """The other Trainer raises an error, and the module's own fit can still be saved and loses nothing."""
    module, taker, whole = Evaluated(RECIPE), quiet_trainer(tmp_path / "other", max_steps=1), Evaluated(RECIPE)
    take = Hook(2, lambda _: getattr(taker, use)(module))
    trainer = quiet_trainer(tmp_path, callbacks=[take])
    with pytest.raises(UnsupportedError, match="is being fitted by another Trainer"):
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed = Evaluated(RECIPE)
    quiet_trainer(tmp_path / "resumed").fit(resumed, ckpt_path=tmp_path / "saved.ckpt")
    fit(whole, tmp_path / "whole")
    assert module.losses + resumed.losses == whole.losses


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_the_process_group_was_destroyed(run: str, tmp_path: Path) -> None:
    """Nothing can gather a module's parameters any more, and the error says to build it anew, which then trains."""
    losses = []
    for name in ("first", "second"):
        module = Evaluated(RECIPE)
        fit(module, tmp_path).save_checkpoint(tmp_path / f"{name}.ckpt")
        losses.append(module.losses)
        torch.distributed.destroy_process_group()
        with pytest.raises(UnsupportedError) as caught:
            getattr(quiet_trainer(tmp_path / "again", max_steps=1), run)(module)
        assert_helpful(caught.value, "Evaluated", "destroyed")
    assert losses[0] == losses[1] and len(losses[0]) == 3
