"""Several fits in a row, and validation, tests and checkpoints after a fit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_smartinfinity import CheckpointError, StorageError, UnsupportedError
from tests.helpers import native_testing as testing
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a fit."""
    folder = tmp_path_factory.mktemp("saved")
    train(Run(out=str(folder), recipe=RECIPE, save_after_fit=str(folder / "a.ckpt")))
    return folder / "a.ckpt"


def _truncate(folder: Path) -> None:
    (file,) = folder.rglob("*optim_states.pt")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _lose_a_file(folder: Path) -> None:
    (file,) = folder.rglob("*optim_states.pt")
    file.unlink()


def _damage(folder: Path) -> None:
    (file,) = folder.rglob("*optim_states.pt")
    content = bytearray(file.read_bytes())
    content[64:512] = bytes(448)
    file.write_bytes(content)


def _lose_the_tag(folder: Path) -> None:
    (folder / "latest").unlink()


@pytest.mark.parametrize(
    "damage",
    long_but([_lose_a_file, _damage], [_truncate, _lose_a_file, _lose_the_tag, _damage]),
    ids=lambda damage: damage.__name__.strip("_"),
)
def test_damaged_checkpoints_are_refused(damage: Any, saved: Path, tmp_path: Path) -> None:
    """A truncated, missing or overwritten file raises a CheckpointError that names the folder."""
    damage(shutil.copytree(saved, tmp_path / "a.ckpt"))
    with pytest.raises(CheckpointError, match=r"a\.ckpt") as caught:
        train(Run(out=str(tmp_path / "b"), recipe=RECIPE, resume=str(tmp_path / "a.ckpt")))
    assert caught.value.remedy.endswith(".")


def test_checkpoints_of_another_kind_are_refused(saved: Path, tmp_path: Path) -> None:
    """A missing path, a plain file or another precision raises a CheckpointError with a remedy."""
    shutil.copytree(saved, tmp_path / "a.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(b"not a folder")
    misfits = {"nothing.ckpt": RECIPE, "plain.ckpt": RECIPE, "a.ckpt": dataclasses.replace(RECIPE, precision="32-true")}
    for name, recipe in misfits.items():
        with pytest.raises(CheckpointError) as caught:
            train(Run(out=str(tmp_path / "b"), recipe=recipe, resume=str(tmp_path / name)))
        assert caught.value.remedy.endswith("."), name


class FailingWrites(pl.Callback):
    """A callback that makes the next write fail before the second step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            testing.inject(trainer.strategy.optimizers[0].update.drained_handler()._device._pipeline, fail_write_at=0)


def test_with_one_place_a_failed_step_loses_the_state_and_says_so(tmp_path: Path) -> None:
    """With durability="none" a failed step raises, and saving afterwards raises instead of saving mixed steps."""
    trainer = quiet_trainer(tmp_path, transfer={"durability": "none"}, callbacks=[FailingWrites()])
    with pytest.raises(StorageError):
        trainer.fit(LitTiny(RECIPE))
    with pytest.raises(StorageError, match="durability"):
        trainer.save_checkpoint(tmp_path / "lost.ckpt")


def test_saving_reads_the_state_once(tmp_path: Path) -> None:
    """A checkpoint reads each extent of the state once."""
    trainer = quiet_trainer(tmp_path)
    trainer.fit(LitTiny(RECIPE))
    strategy: Any = trainer.strategy
    before = strategy.traffic().shared_read_bytes
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    read = strategy.traffic().shared_read_bytes - before
    extents = strategy.optimizers[0].partition.layout.extents
    assert read == sum(extent.nbytes for extent in extents.extents)


class TakesTheModule(pl.Callback):
    """A callback that gives its module to another Trainer in the middle of a fit."""

    def __init__(self, root: Path, use: str) -> None:
        self.trainer, self.use = quiet_trainer(root, max_steps=1), use

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            getattr(self.trainer, self.use)(pl_module)


@pytest.mark.parametrize("use", long_but(["fit"], ["validate", "fit"]))
def test_a_module_in_a_fit_is_not_given_to_another_trainer(use: str, tmp_path: Path) -> None:
    """The other Trainer raises an error, and the module's own fit can still be saved and loses nothing."""
    module, taker = Evaluated(RECIPE), TakesTheModule(tmp_path / "other", use)
    trainer = quiet_trainer(tmp_path, max_steps=3, callbacks=[taker])
    with pytest.raises(UnsupportedError, match="is being fitted by another Trainer"):
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed, whole = Evaluated(RECIPE), Evaluated(RECIPE)
    quiet_trainer(tmp_path / "resumed", max_steps=3).fit(resumed, ckpt_path=tmp_path / "saved.ckpt")
    quiet_trainer(tmp_path / "whole", max_steps=3).fit(whole)
    assert module.losses == whole.losses[:2]
    assert len(resumed.losses) == 1


def test_a_fit_after_the_process_group_was_destroyed(tmp_path: Path) -> None:
    """It trains as the first one did: DeepSpeed does not go on with groups that have ended."""
    losses = []
    for name in ("first", "second"):
        module = LitTiny(RECIPE)
        trainer = quiet_trainer(tmp_path)
        trainer.fit(module)
        losses.append(module.losses)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        torch.distributed.destroy_process_group()
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_module_whose_process_group_was_destroyed(run: str, tmp_path: Path) -> None:
    """Nothing can gather its parameters any more, and the error says to build it anew."""
    module = Evaluated(RECIPE)
    quiet_trainer(tmp_path / "first", max_steps=1).fit(module)
    torch.distributed.destroy_process_group()
    with pytest.raises(UnsupportedError) as caught:
        getattr(quiet_trainer(tmp_path / "second", max_steps=1), run)(module)
    assert_helpful(caught.value, "Evaluated", "destroyed")
