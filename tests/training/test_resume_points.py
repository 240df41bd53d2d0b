"""A resumed fit draws the same random numbers as an uninterrupted one, or warns that it does not.

States of callbacks and schedulers come back by default.

Here Lightning's loops run under a strategy without DeepSpeed. test_storage_resume.py covers the whole flow.
"""

from __future__ import annotations

import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim.lr_scheduler import LambdaLR

from lightning_smartinfinity.resume import loops
from lightning_smartinfinity.resume import random_states as rng
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.random_fit import LitRandom, SaveAt, StatefulLoader, seed
from tests.helpers.trainers import quiet_trainer


class Remembering(SingleDeviceStrategy):
    """A strategy that treats random states as SmartInfinityStrategy does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.state: Any = None

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        checkpoint[rng.RNG_KEY] = rng.capture(self.root_device, world_size=1)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self.state = checkpoint.pop(rng.RNG_KEY)
        return checkpoint

    def on_train_start(self) -> None:
        loops.load_loader_states(self.lightning_module.trainer)
        if self.state is not None:
            rng.restore(self.state, self.root_device)
            loops.continue_epoch(self.lightning_module.trainer)


def fit(module: LitRandom, root: Path, *callbacks: Any, resume: Path | None = None, **options: Any) -> None:
    settings: dict[str, Any] = {"precision": "32-true", "max_epochs": 3, "callbacks": list(callbacks), **options}
    quiet_trainer(root, Remembering(), **settings).fit(module, ckpt_path=resume, weights_only=False)


def resumed_and_straight(
    folder: Path, saved: str, module: dict[str, Any], **options: Any
) -> tuple[list[Any], list[Any], list[str]]:
    """Return the losses of a resumed fit, the same losses of the uninterrupted fit, and the resume warnings."""
    seed(1)
    straight = LitRandom(**module)
    fit(straight, folder, SaveAt(folder, saved), **options)
    seed(2)
    again = LitRandom(**module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(again, folder, resume=folder / f"{saved}.ckpt", **options)
    messages = [str(w.message) for w in caught if "resum" in str(w.message).lower()]
    assert 0 < len(again.losses) < len(straight.losses)
    return again.losses, straight.losses[-len(again.losses) :], messages


EXACT = {
    "end of an epoch": ("epoch-0-4", {}, {}),
    "end of an epoch with validation": ("epoch-0-4", {"validate": True}, {}),
    "end of an epoch, counting steps": ("epoch-0-4", {"validate": True}, {"max_epochs": -1, "max_steps": 12}),
    "end of an epoch, hooks that draw": ("epoch-0-4", {"validate": True, "hooks": True}, {}),
    "end of an epoch, new loader in each": ("epoch-1-4", {}, {"reload_dataloaders_every_n_epochs": 1}),
    "validation at the end of an epoch": ("validation-0-4", {"validate": True, "hooks": True}, {}),
    "validation, counting steps": ("validation-0-4", {"validate": True}, {"max_epochs": -1, "max_steps": 12}),
    "an epoch's last batch": ("batch-0-4", {}, {}),
    "an epoch's last batch, counting steps": ("batch-0-4", {}, {"max_epochs": -1, "max_steps": 12}),
    "within an epoch, stateful": ("batch-1-2", {"stateful": True, "validate": True}, {}),
    "within an epoch, stateful, hooks that draw": ("batch-1-2", {"stateful": True, "hooks": True}, {}),
    "within an epoch, counting steps": ("batch-1-2", {"stateful": True}, {"max_epochs": -1, "max_steps": 12}),
    "within an epoch, loaders set up early": ("batch-1-2", {"stateful": True, "counts_steps": True}, {}),
    "end of an epoch, loaders set up early": ("epoch-0-4", {"stateful": True, "counts_steps": True}, {}),
    "an epoch's last batch, stateful": ("batch-0-4", {"stateful": True}, {}),
    "an epoch's last batch, stateful loaders set up early": ("batch-0-4", {"stateful": True, "counts_steps": True}, {}),
    "end of an epoch, plain loaders set up early": ("epoch-0-4", {"counts_steps": True}, {}),
    "validation within an epoch": ("validation-1-2", {"stateful": True, "validate": True}, {"val_check_interval": 0.5}),
}


USUAL = (
    "end of an epoch with validation",
    "end of an epoch, new loader in each",
    "validation, counting steps",
    "an epoch's last batch, counting steps",
    "within an epoch, stateful, hooks that draw",
    "within an epoch, loaders set up early",
    "an epoch's last batch, stateful loaders set up early",
    "validation within an epoch",
)
"""Together they have every point, loader and setting of the others."""


@pytest.mark.parametrize("name", long_but(USUAL, EXACT))
def test_resume_draws_what_the_uninterrupted_fit_drew(name: str, tmp_path: Path) -> None:
    """Batches, noise and dropout equal the uninterrupted fit's: losses are equal bit for bit, and nothing warns."""
    saved, module, options = EXACT[name]
    resumed, straight, messages = resumed_and_straight(tmp_path, saved, module, **options)
    assert [loss for *_, loss in resumed] == [loss for *_, loss in straight]
    assert not messages


WARNED = {
    "within an epoch, plain": ("batch-1-2", {}, {}, "replays the epoch's batches"),
    "within an epoch, plain, counting steps": ("batch-1-2", {}, {"max_epochs": -1, "max_steps": 12}, "replays"),
    "before the validation of an epoch": ("batch-0-4", {"validate": True}, {}, "leaves out the validation"),
    "before a validation within an epoch": (
        "batch-1-2",
        {"validate": True},
        {"val_check_interval": 0.5},
        "replays the epoch's batches .* and Lightning leaves out the validation",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_resume_that_cannot_be_exact_warns_once(name: str, tmp_path: Path) -> None:
    """One warning says what is not exact and what to do. Lightning adds no warning of its own."""
    saved, module, options, lost = WARNED[name]
    resumed, straight, messages = resumed_and_straight(tmp_path, saved, module, **options)
    assert [loss for *_, loss in resumed] != [loss for *_, loss in straight]
    assert len(messages) == 1
    assert re.search(lost, messages[0])
    assert "resume from a checkpoint of" in messages[0]


def test_random_numbers_of_workers_within_an_epoch_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stateful loader continues, but its workers draw from new seeds. A warning says so."""
    monkeypatch.setattr(StatefulLoader, "num_workers", 2, raising=False)
    *_, messages = resumed_and_straight(tmp_path, "batch-1-2", {"stateful": True})
    assert len(messages) == 1 and "workers" in messages[0]
    *_, messages = resumed_and_straight(tmp_path, "epoch-0-4", {"stateful": True})
    assert not messages


RECIPE = Recipe(validate=True, epoch_batches=2)


class Warmup:
    """A rate that is an object with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**epoch


class Scheduled(LitTiny):
    """A module whose scheduler has an object with a state, and hyperparameters of the kinds that people use."""

    def __init__(self, rate: Any = 0.1, folder: Path = Path("data")) -> None:
        super().__init__(RECIPE)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = RECIPE.build_optimizer(list(self.model.named_parameters()))
        return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, Warmup())}


class History(pl.Callback):
    """A callback whose state is an array."""

    def __init__(self) -> None:
        self.losses = np.zeros(0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.losses = np.append(self.losses, pl_module.losses[-1])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "best": np.float64(self.losses.min(initial=9)), "folder": Path("here")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]
        assert state_dict["best"] == self.losses.min() and state_dict["folder"] == Path("here")


def trainer_of(root: Path, max_epochs: int) -> pl.Trainer:
    return quiet_trainer(
        root,
        max_epochs=max_epochs,
        enable_checkpointing=True,
        enable_progress_bar=True,
        logger=True,
        callbacks=[
            callbacks.ModelCheckpoint(root / "kept", monitor="val_loss", save_top_k=2, save_last=True),
            callbacks.EarlyStopping("val_loss", patience=9),
            callbacks.LearningRateMonitor(),
            callbacks.Timer(timedelta(hours=9)),
            callbacks.GradientAccumulationScheduler({1: 2}),
            callbacks.DeviceStatsMonitor(),
            History(),
        ],
    )


def states_of(trainer: pl.Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {type(each).__name__: each.state_dict() for each in trainer.callbacks}  # type: ignore[attr-defined]
    del found["Timer"]  # it measures
    return found


def test_a_resume_restores_what_callbacks_and_schedulers_keep(tmp_path: Path) -> None:
    """A fit that resumes by default ends in the states of callbacks, rates and losses of one that ran through."""
    whole, module = trainer_of(tmp_path / "whole", 3), Scheduled(rate=np.float32(0.5))
    whole.fit(module)
    first = trainer_of(tmp_path / "parts", 2)
    first.fit(Scheduled(rate=np.float32(0.5)))
    last = tmp_path / "last.ckpt"
    first.save_checkpoint(last)
    resumed, second = Scheduled(), trainer_of(tmp_path / "parts", 3)
    second.fit(resumed, ckpt_path=last)
    assert resumed.losses == module.losses[-len(resumed.losses) :] and len(resumed.losses) == 2
    rates = [[group["lr"] for group in each.optimizers[0].param_groups] for each in (second, whole)]
    assert rates[0] == rates[1]
    assert repr(states_of(second)).replace("parts", "whole") == repr(states_of(whole))
