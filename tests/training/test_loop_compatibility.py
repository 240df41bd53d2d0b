"""Callbacks of Lightning that cannot work are refused at the start. Schedules of accumulation and searches work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.integrations.trainer.callback_support import adapt_callbacks
from tests.helpers.models import Recipe
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
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(),
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured"),
    "Own": Own,
}


@pytest.mark.parametrize(
    ("name", "given_by"), [*((name, "Trainer") for name in REFUSED), ("Own", "configure_callbacks")]
)
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


class Tuned(Everything):
    """A module whose learning rate and batch size are searched; memory seems to run out beyond four sequences."""

    def __init__(self) -> None:
        super().__init__(Recipe(epoch_batches=16, depth=1))
        self.lr, self.batch_size = 1e-3, 1

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, batch_size=self.batch_size)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return OutOfMemory.apply(loss) if len(batch) > 4 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class OutOfMemory(torch.autograd.Function):
    """Raises in backward what torch raises on a GPU."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


FINDERS: dict[str, Callable[[], callbacks.Callback]] = {
    "rate": lambda: callbacks.LearningRateFinder(min_lr=1e-4, max_lr=0.1, num_training_steps=24),
    "batch size": lambda: callbacks.BatchSizeFinder(init_val=1, max_trials=5),
}


@pytest.mark.parametrize("finder", FINDERS)
def test_a_search_by_a_callback(finder: str, tmp_path: Path) -> None:
    """It finds what plain Lightning finds, and the training that follows begins from the first weights."""

    def scenario(make: Any, root: Path) -> Any:
        module = Tuned()
        trainer = make(max_steps=4, callbacks=[FINDERS[finder]()])
        trainer.fit(module)
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        return module.lr, module.batch_size, module.losses[-4:], trainer.global_step, left

    rate, size, *_ = assert_like_plain_lightning(scenario, tmp_path)
    assert (size == 4) is (finder == "batch size") and (rate == 1e-3) is (finder == "batch size")


@pytest.mark.seam(
    "searches of the batch size in one process",
    "BatchSizeFinder.setup, tuning._check_scale_batch_size_configuration: _accelerator_connector.is_distributed.",
)
@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_a_search_by_the_tuner(method: str, tmp_path: Path) -> None:
    """It finds what plain Lightning finds, and a fit by the same Trainer begins anew."""

    def scenario(make: Any, root: Path) -> Any:
        module, trainer = Tuned(), make(max_steps=4)
        if method == "lr_find":
            found = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=0.1, num_training=24).suggestion()
        else:
            found = Tuner(trainer).scale_batch_size(module, init_val=1, max_trials=5)
        before = len(module.losses)
        trainer.fit(module)
        return found, module.lr, module.batch_size, before, module.losses[before:]

    assert_like_plain_lightning(scenario, tmp_path)


@pytest.mark.parametrize("of", [{"devices": 2}, {}], ids=["two processes", "an evaluation"])
def test_a_search_of_the_batch_size_that_cannot_work(of: dict[str, Any], tmp_path: Path) -> None:
    """The error says what to call instead."""
    trainer = quiet_trainer(tmp_path, callbacks=[callbacks.BatchSizeFinder()], **of)
    trainer.state.fn = TrainerFn.FITTING if of else TrainerFn.VALIDATING
    with pytest.raises(UnsupportedError, match="BatchSizeFinder") as caught:
        adapt_callbacks(trainer)
    assert "smart-infinity plan --batch" in caught.value.remedy


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
        optimizer = trainer.strategy.optimizers[0]
        buffer, told = optimizer.rank_state.arena.buffer, optimizer._offload
        assert (told.gradient_itemsize, told.parameter_itemsize) == (buffer.element_size(), 2)  # as the set-up was told
        dtypes.append(str(buffer.dtype))
    assert dtypes == ["torch.float32", "torch.bfloat16"]


def test_the_schedulers_other_checks_stay(tmp_path: Path) -> None:
    """Lightning itself refuses the callback together with Trainer(accumulate_grad_batches=2)."""
    scheduler = callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        quiet_trainer(tmp_path, callbacks=[scheduler], accumulate_grad_batches=2).fit(Everything())
