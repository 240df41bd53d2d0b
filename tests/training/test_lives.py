"""Several fits in a row, and validation and checkpoints after a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_smartinfinity import StorageError, UnsupportedError
from tests.helpers import native_testing as testing
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.stock.systems import Hook
from tests.training.test_bad_input import assert_helpful

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
    module, resumed, straight = Evaluated(RECIPE), LitTiny(RECIPE), LitTiny(RECIPE)
    trainer = fit(module, tmp_path)
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    quiet_trainer(tmp_path / "resumed", max_steps=6).fit(resumed, ckpt_path=tmp_path / "late.ckpt")
    fit(straight, tmp_path / "straight", max_steps=6)
    assert module.losses + resumed.losses == straight.losses


def test_with_one_place_a_failed_step_loses_the_state_and_says_so(tmp_path: Path) -> None:
    """With durability="none" a failed step raises, and saving afterwards raises instead of saving mixed steps."""

    def fail(trainer: Any) -> None:
        testing.inject(trainer.strategy.optimizers[0].update.drained_handler()._device._pipeline, fail_write_at=0)

    trainer = quiet_trainer(tmp_path, transfer={"durability": "none"}, callbacks=[Hook(1, fail)])
    with pytest.raises(StorageError):
        trainer.fit(LitTiny(RECIPE))
    with pytest.raises(StorageError, match="durability"):
        trainer.save_checkpoint(tmp_path / "lost.ckpt")


def test_a_module_in_a_fit_is_not_given_to_another_trainer(tmp_path: Path) -> None:
    """The other Trainer raises an error, and the module's own fit can still be saved and loses nothing."""
    module, taker, whole = Evaluated(RECIPE), quiet_trainer(tmp_path / "other", max_steps=1), Evaluated(RECIPE)
    trainer = quiet_trainer(tmp_path, callbacks=[Hook(2, lambda _: taker.fit(module))])
    with pytest.raises(UnsupportedError, match="is being fitted by another Trainer"):
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed = Evaluated(RECIPE)
    quiet_trainer(tmp_path / "resumed").fit(resumed, ckpt_path=tmp_path / "saved.ckpt")
    fit(whole, tmp_path / "whole")
    assert module.losses + resumed.losses == whole.losses


def test_the_process_group_was_destroyed(tmp_path: Path) -> None:
    """Nothing can gather a module's parameters any more, and the error says to build it anew, which then trains."""
    losses = []
    for run in ("fit", "validate"):
        module = Evaluated(RECIPE)
        fit(module, tmp_path)
        losses.append(module.losses)
        torch.distributed.destroy_process_group()
        with pytest.raises(UnsupportedError) as caught:
            getattr(quiet_trainer(tmp_path / "again", max_steps=1), run)(module)
        assert_helpful(caught.value, "Evaluated", "destroyed")
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("folder", r"a training of LitTiny that began at [\d:]{8} took its storage '.*/storage' \(job 'default'\)\."),
        ("module", r"a training of Evaluated that began at [\d:]{8} took its module\."),
        ("closed", r"close\(\) was called\. Start a new fit"),
    ],
)
def test_why_a_training_was_closed(how: str, told: str, tmp_path: Path) -> None:
    """The error names a later fit on its folder or of its module, or says that close() was called before."""
    module = Evaluated(RECIPE)
    first = fit(module, tmp_path, max_steps=1)
    if how == "closed":
        first.strategy.close()  # type: ignore[attr-defined]
    if how == "module":
        fit(module, tmp_path / "other", max_steps=1)
    else:
        fit(LitTiny(RECIPE), tmp_path, max_steps=1)
    with pytest.raises(StorageError, match=f"has been closed, since {told}"):
        first.save_checkpoint(tmp_path / "first.ckpt")
    assert not (tmp_path / "first.ckpt").exists()
