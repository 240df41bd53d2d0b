"""Several fits in a row, and validation, tests and checkpoints after a fit; each phase shows how far it has come."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, UnsupportedError
from lightning_smartinfinity.common import progress
from tests.helpers import native_testing as testing
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.stock.systems import Hook
from tests.training.test_bad_input import assert_helpful
from tests.training.transformers_worker import BuiltOnTokens, construct
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
    module, path = Evaluated(RECIPE), tmp_path / "fitted.ckpt"
    trainer = fit(module, tmp_path)
    expected = trainer.validate(module, verbose=False)
    trainer.save_checkpoint(path)
    fresh = quiet_trainer(tmp_path / "fresh")
    for evaluate in (fresh.validate, fresh.test):
        (result,) = evaluate(Evaluated(RECIPE), ckpt_path=path, verbose=False)
        assert result["loss"] == pytest.approx(expected[0]["loss"], abs=1e-6)


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
    trainer = quiet_trainer(tmp_path)
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


class Later(LitTiny):
    """A module that is trained after another one."""


def test_a_later_fit_on_the_same_folder(tmp_path: Path) -> None:
    """The error names the module of the later fit, when it began, and the folder that it took."""
    first = fit(LitTiny(RECIPE), tmp_path, max_steps=1)
    fit(Later(RECIPE), tmp_path, max_steps=1)
    with pytest.raises(StorageError) as caught:
        first.save_checkpoint(tmp_path / "first.ckpt")
    problem = caught.value.problem
    assert "has been closed, since a training of Later that began at " in problem
    assert problem.endswith(f"took its storage {str(tmp_path / 'storage')!r} (job 'default').")
    assert not (tmp_path / "first.ckpt").exists()


def test_a_later_fit_of_the_same_module_on_another_folder(tmp_path: Path) -> None:
    """The error says that the module was taken."""
    module = Later(RECIPE)
    first = fit(module, tmp_path, max_steps=1)
    second = SmartInfinityStrategy(tmp_path / "other")
    fit(module, tmp_path, second, max_steps=1)
    with pytest.raises(StorageError, match=r"since a training of Later that began at [\d:]{8} took its module\."):
        first.save_checkpoint(tmp_path / "first.ckpt")
    second.close()


def test_a_strategy_that_was_closed(tmp_path: Path) -> None:
    """The error says who closed it, and keeps to that when a later fit comes."""
    first = fit(LitTiny(RECIPE), tmp_path, max_steps=1)
    assert isinstance(first.strategy, SmartInfinityStrategy)
    first.strategy.close()
    fit(Later(RECIPE), tmp_path, max_steps=1)
    with pytest.raises(StorageError, match=r"has been closed, since close\(\) was called\. Start a new fit"):
        first.save_checkpoint(tmp_path / "first.ckpt")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show every bar at once, and every change of it."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    monkeypatch.setattr(progress, "_LINES_APART", 0.0)


def bars(said: str) -> dict[str, str]:
    """Return the last state of each bar by its name, as ``done/total``."""
    found = re.findall(r"([A-Z][a-z ]+): +100%\|[^|]*\| ([\d.]+[kM]?/[\d.]+[kM]?) ", said)
    return dict(found)


@pytest.mark.usefixtures("impatient")
def test_phases_of_a_training_end_at_their_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Set-up, saving, resuming and evaluating name themselves; the bytes done are the total in the end."""
    trainer = fit(LitTiny(Recipe(frozen=True)), tmp_path)
    said = bars(capsys.readouterr().err)
    assert {"Partitioning the model", "Writing the first optimizer state"} == said.keys()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    said |= bars(capsys.readouterr().err)
    assert {"Saving the model", "Saving the optimizer state"} < said.keys()
    quiet_trainer(tmp_path, max_steps=4).fit(LitTiny(Recipe(frozen=True)), ckpt_path=tmp_path / "a.ckpt")
    said |= bars(capsys.readouterr().err)
    assert "Loading the optimizer state" in said
    quiet_trainer(tmp_path).validate(LitTiny(Recipe(frozen=True)), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    said |= bars(capsys.readouterr().err)
    assert "Loading the weights" in said
    assert all(done == total for done, total in (state.split("/") for state in said.values())), said
    numel = sum(param.numel() for param in LitTiny(Recipe()).parameters())
    assert said["Partitioning the model"].endswith(f"{2 * numel / 1000:.1f}k")


@pytest.mark.usefixtures("impatient")
def test_a_model_built_in_configure_model_and_a_file_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Building shows the bytes built so far, since nobody knows the total; a file of weights shows both."""
    fit(BuiltOnTokens(lambda: construct("gpt2")), tmp_path)
    assert re.search(r"Building the model: [\d.]+kB \[", capsys.readouterr().err)
    torch.save(
        {"state_dict": LitTiny(Recipe()).state_dict(), "pytorch-lightning_version": "2.6.0"}, tmp_path / "w.ckpt"
    )
    strategy = SmartInfinityStrategy(tmp_path / "full", load_full_weights=True)
    quiet_trainer(tmp_path, strategy).validate(LitTiny(Recipe()), ckpt_path=tmp_path / "w.ckpt", verbose=False)
    done, total = bars(capsys.readouterr().err)["Loading the weights"].split("/")
    assert done == total


@pytest.mark.usefixtures("impatient")
def test_other_ranks_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 prints."""
    from lightning_smartinfinity.zero3.ranks.collectives import show_on_rank_zero

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with show_on_rank_zero("Writing", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""
