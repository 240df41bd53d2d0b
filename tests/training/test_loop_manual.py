"""Manual optimization and gradient clipping by modules equal plain Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_smartinfinity import UnsupportedError
from tests.helpers.long_cases import long_but
from tests.helpers.plain import (
    Everything,
    assert_alike,
    assert_fits_like_plain_lightning,
    assert_like_plain_lightning,
)
from tests.helpers.trainers import fit, quiet_trainer


class Manual(Everything):
    """A module with two backward passes per step, for subclasses to extend."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for half in batch.chunk(2):
            loss = self.model(half)
            self.losses.append(float(loss.detach()))
            self.between(optimizer, loss)
        self.finish(optimizer)

    def between(self, optimizer: Any, loss: torch.Tensor) -> None:
        self.manual_backward(loss)

    def finish(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()


class Clipping(Manual):
    """A module that clips after each backward pass and again before the step.

    The second gradients thus add to clipped ones.
    """

    def between(self, optimizer: Any, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def finish(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        super().finish(optimizer)


class Toggling(Manual):
    """A module that toggles its optimizer, as Lightning's documentation shows for GANs."""

    def between(self, optimizer: Any, loss: torch.Tensor) -> None:
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss)
        self.untoggle_optimizer(optimizer)


class EveryOther(Manual):
    """A module that steps after every second batch with a scheduler and drops the gradients of the third batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def finish(self, optimizer: Any) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 3:
            optimizer.zero_grad()
        if self.seen % 2 == 0:
            super().finish(optimizer)
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]


@pytest.mark.parametrize("module", long_but([Clipping, Toggling, EveryOther], [Manual, Clipping, Toggling, EveryOther]))
def test_manual_optimization(module: type[Manual], tmp_path: Path) -> None:
    """All losses, the number of steps and the validation afterwards equal plain Lightning."""

    def scenario(make: Any, root: Path) -> Any:
        trainer, trained = make(max_epochs=2), module()
        trainer.fit(trained)
        return trained.losses, trainer.global_step, trainer.validate(trained, verbose=False)

    assert_like_plain_lightning(scenario, tmp_path)


class Keeping(Manual):
    """A module that leaves out zero_grad."""

    def finish(self, optimizer: Any) -> None:
        optimizer.step()


class Twice(Manual):
    """A module that steps twice behind one backward."""

    def finish(self, optimizer: Any) -> None:
        optimizer.step()
        super().finish(optimizer)


@pytest.mark.parametrize("module", [Keeping, Twice])
def test_a_step_takes_its_gradients(module: type[Manual], tmp_path: Path) -> None:
    """Gradients of the step before do not add up, and a second step has none: the losses are those with zero_grad.

    One warning says so.
    """
    plain, other = Manual(), module()
    fit(plain, tmp_path / "plain", precision="32-true", max_epochs=1)
    with pytest.warns(UserWarning, match=r"Call optimizer\.zero_grad\(\) after each step\.") as caught:
        fit(other, tmp_path / "other", precision="32-true", max_epochs=1)
    assert other.losses == plain.losses
    assert sum("Call optimizer.zero_grad() after each step." in str(each.message) for each in caught) == 1


RESETS: dict[str, Callable[[Any, Any], object]] = {
    "by the module": lambda module, optimizer: module.zero_grad(),
    "by the module, to zeros": lambda module, optimizer: module.zero_grad(set_to_none=False),
    "by the optimizer, to zeros": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the optimizer of torch": lambda module, optimizer: optimizer.optimizer.zero_grad(),
    "by hand": lambda module, optimizer: [setattr(param, "grad", None) for param in module.parameters()],
    "by the engine": lambda module, optimizer: module.trainer.model.zero_grad(),
}


class Resetting(Manual):
    """A module that resets gradients in some way: before its backward passes, and those of the first step once more."""

    def __init__(self, reset: Any) -> None:
        super().__init__()
        self.reset = reset

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.reset(self, self.optimizers())
        super().training_step(batch, batch_idx)

    def finish(self, optimizer: Any) -> None:
        if self.trainer.global_step == 0:
            self.reset(self, optimizer)
            assert all(param.grad is None or not param.grad.any() for param in self.parameters())
            self.manual_backward(self.model(torch.zeros(1, 8, dtype=torch.long)))
        optimizer.step()


@pytest.mark.parametrize("how", RESETS)
def test_gradients_that_are_reset_in_any_way(how: str, tmp_path: Path) -> None:
    """Nothing is warned of, and losses are plain Lightning's where that resets them in the same way."""
    module, plain = Resetting(RESETS[how]), Resetting(RESETS[how])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*zero_grad")
        fit(module, tmp_path, precision="32-true", use_distributed_sampler=False)
    if how != "by the engine":
        fit(plain, tmp_path, "auto", precision="32-true")
        assert_alike(module.losses, plain.losses)


class Direct(Manual):
    """A module that does not use manual_backward."""

    def between(self, optimizer: Any, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


def test_gradients_that_no_rank_reduced_are_refused(tmp_path: Path) -> None:
    """The step refuses gradients of loss.backward(), and changes nothing."""
    trainer = quiet_trainer(tmp_path)
    with pytest.raises(UnsupportedError, match=r"manual_backward") as caught:
        trainer.fit(Direct())
    assert caught.value.remedy.endswith(".")
    assert trainer.strategy.optimizers[0].update.drained_handler().generation == 0


class OwnClipping(Everything):
    """A module whose own hook clips every second step, and whose loss is returned in a dict, by a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.L1Loss()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": self.criterion(loss, torch.zeros_like(loss)), "extra": loss.detach()}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.trainer.global_step % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(Everything, {}, id="none", marks=pytest.mark.long),
        pytest.param(Everything, {"gradient_clip_val": 0.3}, id="norm"),
        pytest.param(Everything, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, id="value"),
        pytest.param(OwnClipping, {}, id="by the module"),
    ],
)
def test_clipping_by_the_trainer(build: Any, settings: dict[str, Any], tmp_path: Path, recwarn: Any) -> None:
    """Clipping by norm, by value, by a hook or not at all over windows of two equals plain Lightning, unwarned."""
    assert_fits_like_plain_lightning(build, tmp_path, max_epochs=2, accumulate_grad_batches=2, **settings)
    assert not any("clip" in str(warning.message) for warning in recwarn)


class SkipsBatches(Everything):
    """A module that returns None from training_step for some batches, as Lightning allows."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_training_step_that_returns_nothing_skips_its_batch(accumulate: int, tmp_path: Path) -> None:
    """A skipped batch updates nothing, as in plain Lightning, and nobody is warned of gradients that were not reset."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*zero_grad")
        assert_fits_like_plain_lightning(SkipsBatches, tmp_path, max_epochs=2, accumulate_grad_batches=accumulate)


def test_each_fit_of_a_trainer_adds_gradients_in_its_own_dtype(tmp_path: Path) -> None:
    """In fp32 if a window of a 16-bit model may have several backwards: in manual loops, or by a schedule."""
    trainer = quiet_trainer(tmp_path, max_steps=1)
    dtypes = []
    for steps, module in enumerate((Everything(), Manual(), Everything(), Everything()), 1):
        trainer.fit_loop.epoch_loop.max_steps = steps
        if steps == 4:
            trainer.callbacks.append(GradientAccumulationScheduler({0: 1, 1: 2}))  # type: ignore[attr-defined]
        trainer.fit(module)
        dtypes.append(trainer.strategy.optimizers[0].rank_state.arena.buffer.dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
