"""Callbacks of Lightning that cannot work are refused at the start. GradientAccumulationScheduler works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.compatibility import REFUSED_CALLBACKS
from tests.helpers.plain import RECIPE, Everything, assert_like_plain_lightning
from tests.helpers.trainers import quiet_trainer


class Own(callbacks.BaseFinetuning):
    """A user's subclass of a refused callback."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        raise AssertionError("it should not come to this")

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        raise AssertionError("it should not come to this")


REFUSED: dict[str, Callable[[], callbacks.Callback]] = {
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.1),
    "WeightAveraging": lambda: callbacks.WeightAveraging(),  # in 16 bit
    "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(),
    "BatchSizeFinder": lambda: callbacks.BatchSizeFinder(),
    "LearningRateFinder": lambda: callbacks.LearningRateFinder(),
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(),
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured"),
    "Own": Own,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("given_by", ["Trainer", "configure_callbacks"])
def test_refused_callbacks_are_named_before_anything_is_written(name: str, given_by: str, tmp_path: Path) -> None:
    """The error names the callback and has a remedy, whether the Trainer or the module provides it."""
    callback, module = REFUSED[name](), Everything()
    if given_by == "configure_callbacks":
        module.configure_callbacks = lambda: [callback]  # type: ignore[method-assign]
    trainer = quiet_trainer(tmp_path, callbacks=[callback] if given_by == "Trainer" else [])
    with pytest.raises(UnsupportedError, match=name) as caught:
        trainer.fit(module)
    assert caught.value.remedy.endswith(".")
    assert not list(tmp_path.iterdir())


def test_every_refusal_is_tested() -> None:
    """The table above covers all callbacks that the strategy refuses."""
    made = [make() for make in REFUSED.values()]
    assert all(any(isinstance(callback, refusal.callback) for callback in made) for refusal in REFUSED_CALLBACKS)


def test_the_tuner_is_refused(tmp_path: Path) -> None:
    """The error names lr_find, whose search is a callback. Lightning itself refuses scale_batch_size."""
    module = Everything()
    module.batch_size = module.lr = 1  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"Tuner\.lr_find"):
        Tuner(quiet_trainer(tmp_path)).lr_find(module)
    with pytest.raises(ValueError, match="distributed strategies"):
        Tuner(quiet_trainer(tmp_path)).scale_batch_size(module)
    assert not list(tmp_path.iterdir())


def test_gradient_accumulation_scheduler(tmp_path: Path) -> None:
    """Windows of one, two and three micro-batches by epoch, some incomplete, train as in plain Lightning.

    The callback can serve another Trainer afterwards.
    """

    def scenario(make: Any, root: Path) -> Any:
        scheduler = callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
        module, seen = Everything(), []
        trainer = make(max_epochs=3, callbacks=[scheduler])
        trainer.fit(module)
        seen.append((module.losses, trainer.global_step))
        assert "on_train_start" not in vars(scheduler)
        again = make(max_epochs=2, callbacks=[scheduler])
        again.fit(module)
        return *seen, again.global_step

    assert_like_plain_lightning(scenario, tmp_path)


def test_a_scheduled_accumulation_is_in_fp32(tmp_path: Path) -> None:
    """Gradients of a 16-bit model add up in fp32 from the start if the schedule will accumulate, and else in bf16."""
    dtypes = []
    for scheduling in ({0: 1, 1: 2}, {0: 1}):
        scheduler = callbacks.GradientAccumulationScheduler(scheduling)
        trainer = quiet_trainer(tmp_path, callbacks=[scheduler], max_steps=1)
        trainer.fit(Everything(RECIPE))
        dtypes.append(str(trainer.strategy.optimizers[0].arena.buffer.dtype))
    assert dtypes == ["torch.float32", "torch.bfloat16"]


def test_the_schedulers_other_checks_stay(tmp_path: Path) -> None:
    """Lightning itself refuses the callback together with Trainer(accumulate_grad_batches=2)."""
    scheduler = callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        quiet_trainer(tmp_path, callbacks=[scheduler], accumulate_grad_batches=2).fit(Everything())
