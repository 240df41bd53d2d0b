"""Callbacks, hooks, logging and searches work as with plain Lightning, or are refused at the start."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, UnsupportedError
from lightning_smartinfinity.integrations.trainer.callback_support import adapt_callbacks
from tests.helpers.assertions import refused
from tests.helpers.models import Recipe
from tests.helpers.plain import RECIPE, Everything, assert_like_plain_lightning
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.actions import does
from tests.training.small import Small


class Unhashable(callbacks.ModelCheckpoint):
    """Defines == without a hash, as a dataclass does."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("== was called")

    __hash__ = None  # type: ignore[assignment]


def test_model_checkpoint_keeps_the_best_and_deletes_the_others(tmp_path: Path) -> None:
    """The checkpoints kept and their names equal plain Lightning's.

    This covers the top two of three, a link to the last, every third step, and weights alone. Callbacks may define ==
    as they like.
    """

    def scenario(make: Any, root: Path) -> Any:
        best = Unhashable(root / "best", monitor="val_loss", mode="min", save_top_k=2, save_last="link")
        steps = Unhashable(root / "steps", every_n_train_steps=3, save_top_k=-1)
        weights = callbacks.ModelCheckpoint(root / "weights", save_weights_only=True)
        make(max_epochs=3, callbacks=[best, steps, weights], enable_checkpointing=True).fit(Everything())
        names = [sorted(path.name for path in (root / kind).iterdir()) for kind in ("best", "steps", "weights")]
        assert (root / "best" / "last.ckpt").is_symlink()
        link = (root / "best" / "last.ckpt").resolve().name
        validated = make().validate(Everything(), ckpt_path=weights.best_model_path, verbose=False)
        scores = sorted(float(score) for score in best.best_k_models.values())
        resumed = Everything()
        make(max_epochs=4).fit(resumed, ckpt_path=root / "best" / "last.ckpt")
        return names, link, Path(best.best_model_path).name, scores, validated, resumed.losses

    assert_like_plain_lightning(scenario, tmp_path)


HOOKS = [name for name in vars(ModelHooks) if name.startswith("on_")]
CALLBACK_HOOKS = [name for name in vars(callbacks.Callback) if name.startswith("on_")]


def record_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Record the order in which hooks of the module and of a callback are called."""
    order: list[str] = []

    def note(label: str, *_: Any, **__: Any) -> None:
        order.append(label)

    for name in HOOKS:
        setattr(module, name, partial(note, f"module.{name}"))
    names = [name for name in CALLBACK_HOOKS if not name.startswith(("on_save", "on_load", "on_exception"))]
    watcher: Any = callbacks.LambdaCallback(**{name: partial(note, f"callback.{name}") for name in names})
    trainer.callbacks.append(watcher)  # type: ignore[attr-defined]
    return order


def test_hooks_are_called_in_the_order_of_plain_lightning(tmp_path: Path) -> None:
    """fit, validate, test and predict call hooks in the order of plain Lightning."""

    def scenario(make: Any, root: Path) -> Any:
        trainer, module = make(max_epochs=2, limit_train_batches=3, accumulate_grad_batches=2), Everything()
        order = record_hooks(trainer, module)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        trainer.predict(module)
        return order

    order = assert_like_plain_lightning(scenario, tmp_path)
    for name in ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"):
        assert f"module.{name}" in order and f"callback.{name}" in order


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_rates_and_momenta_are_monitored_without_a_scheduler(optimizer: str, tmp_path: Path) -> None:
    """LearningRateMonitor logs what it logs with plain Lightning, and the optimizer has its defaults."""
    recipe = dataclasses.replace(RECIPE, groups=True, optimizer=optimizer, eps=None)

    def scenario(make: Any, root: Path) -> Any:
        monitor = callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        logger, defaults = CSVLogger(root, version=0), []
        note = callbacks.LambdaCallback(
            on_train_start=lambda trainer, *_: defaults.append(trainer.optimizers[0].defaults)
        )
        make(max_steps=2, callbacks=[monitor, note], logger=logger, log_every_n_steps=1).fit(Everything(recipe))
        return monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values, defaults

    rates, momenta, *_ = assert_like_plain_lightning(scenario, tmp_path)
    assert (
        list(rates) == [f"lr-{optimizer}/pg1", f"lr-{optimizer}/pg2"]
        and list(momenta.values()) == [0.9 if optimizer == "AdamW" else 0.0] * 2
    )


@pytest.mark.seam("copies share the module", "They get ``log`` and log_dict early; copy.deepcopy calls __deepcopy__.")
def test_callbacks_are_copied_within_a_fit(tmp_path: Path) -> None:
    """Copies behave as with plain Lightning. Trainers to which they refer are copied, too, and share the training."""

    def scenario(make: Any, root: Path) -> Any:
        early: list[Any] = []
        late: list[Any] = []
        copying = callbacks.LambdaCallback(
            setup=lambda trainer, *_, **__: early.append(copy.deepcopy(trainer.callbacks)),
            on_fit_start=lambda trainer, *_: late.append(copy.deepcopy(trainer.callbacks)),
        )
        keeper, module = callbacks.ModelCheckpoint(root / "kept"), Everything()
        settings = {"enable_checkpointing": True, "enable_progress_bar": True}
        trainer = make(max_steps=2, callbacks=[copying, keeper], **settings)
        trainer.validate(module, verbose=False)
        trainer.fit(module)
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module)
        (bar,) = (each for each in late[-1] if isinstance(each, callbacks.ProgressBar))
        kept = trainer.callbacks
        assert bar.trainer is not trainer and all(one is not other for one, other in zip(late[-1], kept, strict=True))
        if isinstance(trainer.strategy, SmartInfinityStrategy):
            assert (bar.trainer.strategy, bar.trainer.lightning_module) == (trainer.strategy, module)
        return [[type(callback).__name__ for callback in copies] for copies in (*late, *early)], module.losses

    copies, _ = assert_like_plain_lightning(scenario, tmp_path)
    assert len(copies) == 5 and all("ModelCheckpoint" in each and each == copies[0] for each in copies)


class Saving(Everything):
    """A module that leaves a weight out of its checkpoints, and notes what it is asked to save and when."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, list[str]]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.asked.append((self.trainer.global_step, list(checkpoint["state_dict"])))
        checkpoint["state_dict"].pop("model.positions.weight")
        checkpoint["mine"] = self.trainer.global_step


class Loading(Saving):
    """A module that also loads what it has saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] is not None


def test_saving_hooks_are_called_for_checkpoints(tmp_path: Path) -> None:
    """Hooks of a module and a callback that only save are called as in plain Lightning, and see the weights' names."""

    def scenario(make: Any, root: Path) -> Any:
        steps: list[int] = []
        watcher = callbacks.LambdaCallback(on_save_checkpoint=lambda trainer, *_: steps.append(trainer.global_step))
        keeper, module = callbacks.ModelCheckpoint(root / "kept", every_n_train_steps=2), Saving()
        make(max_steps=4, callbacks=[watcher, keeper], enable_checkpointing=True).fit(module)
        return module.asked, steps

    _, steps = assert_like_plain_lightning(scenario, tmp_path)
    assert steps == [2, 4]


def test_saving_hooks_of_what_loads_are_called_for_training_records(tmp_path: Path) -> None:
    """What a module can load is in the record of each step; its hook sees the names that it sees for a checkpoint.

    A name that the hook removes is saved all the same, and a warning says so.
    """
    module = Loading()
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(module)
    with pytest.warns(UserWarning, match=r"added or removed 'model.positions.weight' and 0 more in.*exclude_frozen"):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert [step for step, _ in module.asked] == [0, 1, 2, 2]
    assert all(names == module.asked[-1][1] for _, names in module.asked)


class Own(callbacks.BackboneFinetuning):
    """A user's subclass of a refused callback."""


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
    with refused(UnsupportedError, match=name):
        trainer.fit(module)
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


def find_rate_by_tuner(trainer: pl.Trainer, module: Tuned) -> Any:
    return Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=0.1, num_training=24).suggestion()  # type: ignore[union-attr]


def find_size_by_tuner(trainer: pl.Trainer, module: Tuned) -> Any:
    return Tuner(trainer).scale_batch_size(module, init_val=1, max_trials=5)


def find_rate_in_fit(trainer: pl.Trainer, module: Tuned) -> Any:
    finder = callbacks.LearningRateFinder(min_lr=1e-4, max_lr=0.1, num_training_steps=24)
    trainer.callbacks.append(finder)  # type: ignore[attr-defined]


def find_size_in_fit(trainer: pl.Trainer, module: Tuned) -> Any:
    trainer.callbacks.append(callbacks.BatchSizeFinder(init_val=1, max_trials=5))  # type: ignore[attr-defined]


@pytest.mark.seam(
    "searches of the batch size in one process",
    "BatchSizeFinder.setup, tuning._check_scale_batch_size_configuration: _accelerator_connector.is_distributed.",
)
@pytest.mark.parametrize("find", [find_rate_by_tuner, find_size_by_tuner, find_rate_in_fit, find_size_in_fit])
def test_a_search(find: Callable[[pl.Trainer, Tuned], Any], tmp_path: Path) -> None:
    """The search finds what plain Lightning finds, and the training after it begins from the initial weights."""

    def scenario(make: Any, root: Path) -> Any:
        module, trainer = Tuned(), make(max_steps=4)
        found = find(trainer, module)
        trainer.fit(module)
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        return found, module.lr, module.batch_size, module.losses[-4:], trainer.global_step, left

    _, rate, size, *_ = assert_like_plain_lightning(scenario, tmp_path)
    assert (size == 4) is ("size" in find.__name__) and (rate == 1e-3) is ("size" in find.__name__)


@pytest.mark.parametrize("of", [{"devices": 2}, {}], ids=["two processes", "an evaluation"])
def test_a_search_of_the_batch_size_that_cannot_work(of: dict[str, Any], tmp_path: Path) -> None:
    """The error says what to call instead."""
    trainer = quiet_trainer(tmp_path, callbacks=[callbacks.BatchSizeFinder()], **of)
    trainer.state.fn = TrainerFn.FITTING if of else TrainerFn.VALIDATING
    with refused(UnsupportedError, match="BatchSizeFinder", remedy="smart-infinity plan --batch"):
        adapt_callbacks(trainer)


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


def test_the_schedulers_other_checks_stay(tmp_path: Path) -> None:
    """Lightning itself refuses the callback together with Trainer(accumulate_grad_batches=2)."""
    scheduler = callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        fit(Everything(), tmp_path, callbacks=[scheduler], accumulate_grad_batches=2)


# ---- callbacks that average weights


class Averaged(Small):
    """Notes the losses of validation, too."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.seen.append(float(((self.net(batch) - 1) ** 2).mean()))


class BuiltLate(Averaged):
    """The same network, whose layers are divided over the processes as they are made."""

    def configure_model(self) -> None:
        self.net = Averaged().net


CALLBACKS: dict[str, Any] = {
    "mean": WeightAveraging,
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "EMA by epoch": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=-1, update_starting_at_epoch=0),
}


def saving(root: Path) -> pl.Callback:
    """Return a callback that saves ``middle.ckpt`` after the first epoch."""

    def save(trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(root / "middle.ckpt")

    return does(on_train_epoch_end=save)


def final(module: Averaged) -> list[float]:
    """Return the losses and the sum of the squares of each final weight."""
    return [*module.seen, *(float(param.detach().square().sum()) for param in module.parameters())]


@pytest.mark.seam("average under a key", "WeightAveraging._average_model, on_save_checkpoint, on_load_checkpoint.")
@pytest.mark.parametrize(
    ("how", "precision", "rel"),
    [
        ("mean", "32-true", 1e-5),
        ("EMA by epoch", "32-true", 1e-5),
        ("EMA", "bf16-mixed", 0.1),
    ],
)
def test_an_average_trains_validates_and_resumes_as_in_memory(
    how: str, precision: str, rel: float, tmp_path: Path
) -> None:
    """Validation sees the average, training goes on with the weights, and a checkpoint brings both back."""
    results = {}
    for strategy in ("auto", None):
        root, module, resumed = tmp_path / str(strategy), Averaged(), Averaged()
        settings: dict[str, Any] = {"precision": precision, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
        fit(module, root, strategy, callbacks=[CALLBACKS[how](), saving(root)], max_epochs=2, **settings)
        again = quiet_trainer(root, strategy, callbacks=[CALLBACKS[how]()], max_epochs=2, **settings)
        again.fit(resumed, ckpt_path=root / "middle.ckpt", weights_only=False)
        results[strategy] = [*final(module), *final(resumed)]
    assert results[None] == pytest.approx(results["auto"], rel=rel)


@pytest.mark.parametrize("module", [Averaged, BuiltLate])
def test_validation_rounds_neither_the_weights_nor_their_average(module: type[Averaged], tmp_path: Path) -> None:
    """In 16 bit the average and the masters change places in fp32; a checkpoint has the average in fp32."""
    ends = []
    for name, batches in (("with", 1.0), ("without", 0), ("resumed", 1.0)):
        callback = EMAWeightAveraging(decay=0.999)
        settings: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": batches, "max_epochs": 2}
        trainer = quiet_trainer(tmp_path / name, callbacks=[callback, saving(tmp_path / name)], **settings)
        resumed: dict[str, Any] = {"ckpt_path": tmp_path / "with/middle.ckpt", "weights_only": False}
        trainer.fit(module(), **(resumed if name == "resumed" else {}))
        ends.append([param.detach().float() for param in callback._average_model.module.parameters()])
    assert any((value.bfloat16().float() != value).any() for value in ends[0])
    for values in ends[1:]:
        torch.testing.assert_close(values, ends[0], rtol=0, atol=0)
