"""Manual optimization, clipping by modules, and methods that a module overrides equal plain Lightning and memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_smartinfinity import UnsupportedError
from tests.helpers.assertions import refused
from tests.helpers.long_cases import long_but
from tests.helpers.plain import (
    RECIPE,
    Everything,
    assert_alike,
    assert_fits_like_plain_lightning,
    assert_like_plain_lightning,
)
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.small import Small, assert_as_in_memory, changed


class Manual(Everything):
    """A module with a backward pass per step for each part of the batch, for subclasses to extend."""

    num_parts = 2

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for part in batch.chunk(self.num_parts):
            loss = self.model(part)
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
    assert (
        other.losses == plain.losses
        and sum("Call optimizer.zero_grad() after each step." in str(each.message) for each in caught) == 1
    )


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
    with refused(UnsupportedError, match=r"manual_backward"):
        trainer.fit(Direct())
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


# ---- methods of Lightning and torch that a module overrides run as in memory, and may return anything


class InTwoParts(Small):
    """Runs backward twice, once with a graph that it keeps."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.25).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        self.seen.append(float(self.net[0].weight.grad.norm()))  # type: ignore[operator, union-attr]
        super().backward(loss * 2, torch.tensor(0.5), **kwargs)


class Clipped(Small):
    """Looks at what it has clipped."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.seen.append(float(torch.stack([param.grad.norm() for param in self.parameters()]).norm()))  # type: ignore[union-attr]


class Looking(Small):
    """Looks at gradients, from which a penalty on the input's gradient is made, in validation."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        with torch.enable_grad():
            batch = batch.clone().requires_grad_()
            loss = self.net(batch).square().mean()
            found = torch.autograd.grad(loss, [batch, self.net[4].weight])  # type: ignore[list-item]
        self.seen.extend(float(gradient.norm()) for gradient in found)

    def on_validation_epoch_end(self) -> None:
        with deepspeed.zero.GatheredParameters(list(self.parameters())):
            self.seen.extend(float(param.norm()) for param in self.parameters())


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (InTwoParts, {}),
        (InTwoParts, {"accumulate_grad_batches": 2}),
        (Clipped, {"gradient_clip_val": 0.05}),
        (Looking, {"inference_mode": False}),
    ],
)
def test_an_overridden_method_does_what_it_does_in_memory(
    make: Callable[[], Small], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, what the method sees and the weights at the end are equal."""
    assert_as_in_memory(tmp_path, make, max_epochs=2, **settings)


class Passing(nn.Linear):
    """Passes on what it is asked to save and to load."""

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


class Saved(Small):
    """Overrides everything by which weights come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Passing(8, 32)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        self.seen.append(checkpoint["state_dict"]["net.0.weight"].clone())


def test_a_module_with_its_own_state_dict_is_saved_and_resumed(tmp_path: Path) -> None:
    """A checkpoint of the first epoch brings back the weights that it had."""
    trained, resumed = Saved(), Saved()
    fit(trained, tmp_path, precision="32-true").save_checkpoint(tmp_path / "one.ckpt")
    again = quiet_trainer(tmp_path, precision="32-true", max_steps=4)
    again.fit(resumed, ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert torch.equal(resumed.seen[0], trained.net[0].weight.detach().clone())  # type: ignore[operator, union-attr]
    assert len(resumed.seen) == 2


def test_a_checkpoint_with_storage_options_is_refused(tmp_path: Path) -> None:
    """Lightning would raise a TypeError of its own, in the midst of saving."""
    trainer = fit(Small(), tmp_path, max_steps=1)
    with pytest.raises(UnsupportedError, match=r"storage_options=\{'key': 1\}"):
        trainer.save_checkpoint(tmp_path / "one.ckpt", storage_options={"key": 1})


def of_data(**settings: Any) -> Any:
    torch.manual_seed(5)
    return DataLoader(torch.randn(20, 8), batch_size=4, **settings)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": of_data,
    "shuffled": lambda: of_data(shuffle=True),
    "weighted": lambda: of_data(sampler=WeightedRandomSampler([1.0] * 10 + [3.0] * 10, 12)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_one_process_sees_the_batches_of_its_loader(kind: str, tmp_path: Path) -> None:
    """Lightning would put a sampler for several processes into it, which shuffles."""
    make = changed(lambda module: setattr(module, "train_dataloader", LOADERS[kind]))
    assert_as_in_memory(tmp_path, make, max_epochs=2, use_distributed_sampler=True)


@dataclass(slots=True)
class Slotted:
    """An object without a dictionary of attributes."""

    value: float


OUTPUTS: dict[str, Any] = {
    "a float": 0.5,
    "an int": 3,
    "text": "text",
    "a bool": True,
    "bytes": b"bytes",
    "a set": {1, 2},
    "an array": np.arange(3.0),
    "a scalar of numpy": np.float32(0.5),
    "an object with slots": Slotted(0.5),
    "a class": Slotted,
    "a dictionary with other keys than text": {0: "zero", (1, 2): 0.5, None: [1]},
    "a list": [1, "text", None],
    "nothing": None,
}


class Returning(Everything):
    """A module whose evaluation returns each of these outputs in turn, also through a submodule."""

    def __init__(self) -> None:
        super().__init__(RECIPE)
        self.seen: list[Any] = []
        self.passing = nn.Identity()
        self.passing.weight = nn.Parameter(torch.ones(1))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.model(batch)
        return self.passing(list(OUTPUTS.values())[batch_idx])

    test_step = predict_step = validation_step

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)

    on_test_batch_end = on_validation_batch_end

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(len(OUTPUTS), 16, dtype=torch.long), batch_size=1)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


def test_evaluation_steps_and_submodules_return_anything(tmp_path: Path) -> None:
    """Lightning's loops and callbacks see the very outputs, before a fit, within it and after it."""

    def scenario(make: Any, root: Path) -> Any:
        module = Returning()
        trainer = make(max_steps=1, num_sanity_val_steps=0, val_check_interval=1, limit_train_batches=1)
        trainer.validate(module, verbose=False)
        trainer.fit(module)
        trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        assert len(module.seen) == 3 * len(OUTPUTS)
        return [[repr(output) for output in outputs] for outputs in (module.seen, predicted)]

    seen, predicted = assert_like_plain_lightning(scenario, tmp_path)
    assert seen == [repr(output) for output in OUTPUTS.values()] * 3
    assert predicted == [repr(output) for output in OUTPUTS.values()]


def test_a_training_step_that_returns_a_float(tmp_path: Path) -> None:
    """Lightning's own error says what to return, as with other strategies."""
    module = Everything()
    module.training_step = lambda batch, batch_idx: 0.5  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match="must return a Tensor"):
        fit(module, tmp_path)
