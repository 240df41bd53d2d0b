"""Callbacks, hooks and logging work as with plain Lightning."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.loggers import CSVLogger

from lightning_smartinfinity import SmartInfinityStrategy
from tests.helpers.long_cases import long_but
from tests.helpers.plain import RECIPE, Everything, assert_like_plain_lightning
from tests.helpers.trainers import quiet_trainer


def test_model_checkpoint_keeps_the_best_and_deletes_the_others(tmp_path: Path) -> None:
    """The checkpoints kept and their names equal plain Lightning's.

    This covers the top two of three, a link to the last, every third step, and weights alone.
    """

    def scenario(make: Any, root: Path) -> Any:
        best = callbacks.ModelCheckpoint(root / "best", monitor="val_loss", mode="min", save_top_k=2, save_last="link")
        steps = callbacks.ModelCheckpoint(root / "steps", every_n_train_steps=3, save_top_k=-1)
        weights = callbacks.ModelCheckpoint(root / "weights", save_weights_only=True)
        module = Everything()
        make(max_epochs=3, callbacks=[best, steps, weights], enable_checkpointing=True).fit(module)
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


@pytest.mark.parametrize("accumulate", long_but([2], [1, 2]))
def test_hooks_are_called_in_the_order_of_plain_lightning(accumulate: int, tmp_path: Path) -> None:
    """fit, validate, test and predict call hooks in the order of plain Lightning."""

    def scenario(make: Any, root: Path) -> Any:
        trainer, module = make(max_epochs=2, limit_train_batches=3, accumulate_grad_batches=accumulate), Everything()
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
    assert list(rates) == [f"lr-{optimizer}/pg1", f"lr-{optimizer}/pg2"]
    assert list(momenta.values()) == [0.9 if optimizer == "AdamW" else 0.0] * 2


@pytest.mark.seam(
    "copies share the module", "They get ``log`` and log_dict early; copy.deepcopy asks for __deepcopy__."
)
def test_callbacks_are_copied_within_a_fit(tmp_path: Path) -> None:
    """Copies are as with plain Lightning. Trainers that they refer to are copies, too, which share the one training."""

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
        for copies in late:
            assert all(one is not other for one, other in zip(copies, trainer.callbacks, strict=True))
            (bar,) = (callback for callback in copies if isinstance(callback, callbacks.ProgressBar))
            assert bar.trainer is not trainer
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
