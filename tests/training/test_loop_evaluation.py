"""validate, test and predict work during, before and after a fit, and from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_smartinfinity import UnsupportedError
from tests.helpers.plain import RECIPE, Everything, assert_like_plain_lightning
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit, quiet_trainer


def evaluate(trainer: Any, module: Any = None, **options: Any) -> list[Any]:
    """Return the results of validate, test and predict."""
    return [
        trainer.validate(module, verbose=False, **options),
        trainer.test(module, verbose=False, **options),
        torch.cat(trainer.predict(module, **options)),
    ]


def test_before_after_and_between_fits(tmp_path: Path) -> None:
    """Evaluation before, between and after two fits equals plain Lightning, also of another module.

    The fitted module can still be saved then, and hooks run once per forward: an engine leaves none of its own behind.
    """

    def scenario(make: Any, root: Path) -> Any:
        trainer, module, resumed, calls, hooks = make(max_epochs=1), Everything(), Everything(), [], []
        module.model.norm.register_forward_hook(lambda *_: calls.append(1))
        seen = [evaluate(trainer, module)]
        for max_epochs in (1, 2):
            trainer.fit_loop.max_epochs = max_epochs
            trainer.fit(module)
            seen += [evaluate(trainer, module), trainer.validate(Everything(), verbose=False), len(calls)]
            hooks.append(sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()))
            trainer.save_checkpoint(root / "last.ckpt")
        make(max_epochs=3).fit(resumed, ckpt_path=root / "last.ckpt")
        assert hooks[0] == hooks[1] and len(resumed.losses) == RECIPE.epoch_batches
        return seen, module.losses, trainer.global_step, trainer.current_epoch

    assert_like_plain_lightning(scenario, tmp_path)


def test_checkpoints_by_path_best_and_last(tmp_path: Path) -> None:
    """ckpt_path= takes a path in a fresh Trainer with an unfitted module, and "best" and "last" after the fit."""

    def scenario(make: Any, root: Path) -> Any:
        keeper = ModelCheckpoint(root / "kept", monitor="val_loss", mode="max", save_last=True, save_top_k=-1)
        trainer, module = make(max_epochs=2, callbacks=[keeper], enable_checkpointing=True), Everything()
        trainer.fit(module)
        # Loading a checkpoint also resets the callback.
        best, last = keeper.best_model_path, keeper.last_model_path
        seen = [evaluate(trainer, ckpt_path=which) for which in ("last", "best", best)]
        return seen + [evaluate(make(), Everything(), ckpt_path=path) for path in (best, last)]

    last, best, path, fresh_best, fresh_last = assert_like_plain_lightning(scenario, tmp_path)
    assert torch.equal(best[2], path[2]) and torch.equal(best[2], fresh_best[2])
    assert torch.equal(last[2], fresh_last[2]) and not torch.equal(best[2], last[2])


class Counting(Everything):
    """A module that counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)


def test_what_was_loaded_for_evaluation_is_what_is_saved(tmp_path: Path) -> None:
    """A checkpoint saved after validate(ckpt_path=...) holds the loaded weights and buffers, as in plain Lightning.

    A fit after it begins with them, and may load the checkpoint of a whole epoch once more.
    """

    def scenario(make: Any, root: Path) -> Any:
        trainer, module, fresh = make(max_epochs=1), Counting(), Counting()
        trainer.fit(module)
        trainer.save_checkpoint(root / "early.ckpt")
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module)
        early = trainer.validate(module, ckpt_path=root / "early.ckpt", verbose=False)
        trainer.save_checkpoint(root / "saved.ckpt")
        again = make(max_epochs=1)
        saved = again.validate(fresh, ckpt_path=root / "saved.ckpt", verbose=False)
        again.fit(fresh)
        again.fit_loop.max_epochs = 2
        again.fit(fresh, ckpt_path=root / "early.ckpt")
        return early, saved, fresh.seen, fresh.losses, again.global_step

    early, saved, *_ = assert_like_plain_lightning(scenario, tmp_path)
    assert saved == early


def test_another_precision_for_the_same_module_is_refused(tmp_path: Path) -> None:
    """A module that bf16-mixed partitioned cannot be used in fp32, but it can in bf16-true."""
    module = Everything()
    fit(module, tmp_path / "a")
    trainer = quiet_trainer(tmp_path / "b", precision="32-true")
    for run in (trainer.fit, trainer.validate):
        with pytest.raises(UnsupportedError, match="bfloat16") as caught:
            run(module)
        assert caught.value.remedy.endswith(".")
    assert not (tmp_path / "b" / "storage").exists()
    fit(module, tmp_path / "c", precision="bf16-true")


class SameOnEveryRank(Everything):
    """A module that trains every rank on the first batch, so that the weights do not depend on the number of ranks."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(self.recipe.batch(0))  # type: ignore[no-any-return]


class WithoutParameters(pl.LightningModule):
    """A module that computes its loss from the data alone, like a baseline to compare with."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", batch.float().mean())

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return 2 * batch

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return RECIPE.validation_loader()

    predict_dataloader = val_dataloader


def predict_around_a_fit(trainer: pl.Trainer, checkpoint: Path) -> list[torch.Tensor]:
    """Return this rank's predictions.

    They are those before and after a fit, of a module without parameters, and from a checkpoint.
    """

    def predict(module: pl.LightningModule, path: Path | None = None) -> torch.Tensor:
        return torch.cat(trainer.predict(module, ckpt_path=path))  # type: ignore[arg-type]

    module = SameOnEveryRank()
    before = predict(module)
    trainer.fit(module)
    return [before, predict(module), predict(WithoutParameters()), predict(SameOnEveryRank(), checkpoint)]


def predict_on_ranks(root: Path) -> list[torch.Tensor]:
    trainer = quiet_trainer(root / "two", devices=2, precision="32-true", max_steps=1)
    return predict_around_a_fit(trainer, root / "one.ckpt")


def test_two_processes_predict_what_one_does(tmp_path: Path) -> None:
    """The predictions of two ranks together equal those of one process.

    They do so before and after a fit, without weights, and from a checkpoint that one process has saved.
    """
    saving, trainer = (quiet_trainer(tmp_path / name, precision="32-true", max_steps=1) for name in ("saving", "one"))
    saving.fit(Everything())
    saving.save_checkpoint(tmp_path / "one.ckpt")
    expected = predict_around_a_fit(trainer, tmp_path / "one.ckpt")
    for one, *of_ranks in zip(expected, *on_ranks(predict_on_ranks, tmp_path), strict=True):
        torch.testing.assert_close(torch.stack(of_ranks, 1).flatten(0, 1), one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_without_parameters(precision: Any, tmp_path: Path) -> None:
    """It is evaluated as in plain Lightning, and has no parameters afterwards either."""

    def scenario(make: Any, root: Path) -> Any:
        module, trainer = WithoutParameters(), make(precision=precision)
        validated = trainer.validate(module, verbose=False)
        assert not list(module.parameters())
        return validated, torch.cat(trainer.predict(module))

    assert_like_plain_lightning(scenario, tmp_path)
