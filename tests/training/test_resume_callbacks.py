"""What Lightning's callbacks and torch's schedulers keep comes back by default, without any consent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch import callbacks
from torch.optim import lr_scheduler

from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

RECIPE = Recipe(validate=True, epoch_batches=2)


class Warmup:
    """A rate that is an object with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Warmup()),
    "ReduceLROnPlateau": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9),
        "monitor": "val_loss",
    },
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 1), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
        milestones=[1],
    ),
}


class Scheduled(LitTiny):
    """A module with a scheduler, and hyperparameters of the kinds that people use."""

    def __init__(self, kind: str, rate: Any = 0.1, folder: Path = Path("data")) -> None:
        super().__init__(RECIPE)
        self.save_hyperparameters()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = RECIPE.build_optimizer(list(self.model.named_parameters()))
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[self.kind](optimizer)}


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


@pytest.mark.parametrize("kind", long_but(["LambdaLR of an object"], SCHEDULERS))
def test_a_resume_restores_what_callbacks_and_schedulers_keep(kind: str, tmp_path: Path) -> None:
    """A fit that resumes by default ends in the states of callbacks, rates and losses of one that ran through."""
    whole, module = trainer_of(tmp_path / "whole", 3), Scheduled(kind, rate=np.float32(0.5))
    whole.fit(module)
    first = trainer_of(tmp_path / "parts", 2)
    first.fit(Scheduled(kind, rate=np.float32(0.5)))
    last = tmp_path / "last.ckpt"
    first.save_checkpoint(last)
    resumed, second = Scheduled(kind), trainer_of(tmp_path / "parts", 3)
    second.fit(resumed, ckpt_path=last)
    assert resumed.losses == module.losses[-len(resumed.losses) :] and len(resumed.losses) == 2
    rates = [[group["lr"] for group in each.optimizers[0].param_groups] for each in (second, whole)]
    assert rates[0] == rates[1]
    assert repr(states_of(second)).replace("parts", "whole") == repr(states_of(whole))
