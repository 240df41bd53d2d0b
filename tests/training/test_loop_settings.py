"""Settings that change how loops run give the results of plain Lightning; a step's traffic; the user's loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything, assert_like_plain_lightning
from tests.helpers.trainers import quiet_trainer
from tests.stock.systems import Hook

SETTINGS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2},
    "no training batch": {"limit_train_batches": 0, "max_epochs": 1},
    "half of the training batches": {"limit_train_batches": 0.5, "max_epochs": 2},
    "windows that the limit cuts": {"limit_train_batches": 3, "accumulate_grad_batches": 2, "max_epochs": 2},
    "no validation batch": {"limit_val_batches": 0, "max_epochs": 1},
    "no test and prediction batch": {"limit_test_batches": 0, "limit_predict_batches": 0, "max_epochs": 1},
    "some batches of each": {"limit_val_batches": 0.25, "limit_test_batches": 3, "limit_predict_batches": 1},
    "validation twice an epoch": {"val_check_interval": 0.5, "max_epochs": 2},
    "validation across epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_steps": 7},
    "no sanity check": {"num_sanity_val_steps": 0, "max_epochs": 1},
    "a whole sanity check": {"num_sanity_val_steps": -1, "max_epochs": 1},
    "anomaly detection, no inference mode": {"detect_anomaly": True, "inference_mode": False, "max_steps": 2},
    "reloaded loaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
    "time for nothing": {"max_time": {"seconds": 0}, "max_epochs": 2},
    "at least so many steps": {"min_steps": 6, "max_epochs": 2},
}

USUAL = (
    "fast_dev_run",
    "overfit_batches",
    "no training batch",
    "windows that the limit cuts",
    "some batches of each",
    "validation across epochs",
    "reloaded loaders",
)


class Counting(Everything):
    """A module that counts how often each loader was requested."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = {"train": 0, "val": 0}

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        self.asked["train"] += 1
        return super().train_dataloader()

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        self.asked["val"] += 1
        return super().val_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.parametrize("name", long_but(USUAL, SETTINGS))
def test_setting(name: str, tmp_path: Path) -> None:
    """Losses, metrics, predictions, progress and the number of loaders made equal plain Lightning."""

    def scenario(make: Any, root: Path) -> Any:
        trainer, module = make(**{"max_steps": -1, **SETTINGS[name]}), Counting()
        if "max_epochs" not in SETTINGS[name] and "max_steps" not in SETTINGS[name]:
            trainer.fit_loop.max_epochs = 1
        trainer.fit(module)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        tested = trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        progress = (trainer.global_step, trainer.current_epoch, trainer.num_training_batches)
        return module.losses, metrics, tested, predicted, progress, module.asked

    assert_like_plain_lightning(scenario, tmp_path)


@pytest.mark.parametrize(("precision", "read"), [("bf16-mixed", 12), ("32-true", 8)])
def test_sixteen_bit_steps_move_twelve_bytes_each_way(precision: Any, read: int, tmp_path: Path) -> None:
    """The kernel's counters and ours show 12 to 12.5 B read and written per parameter and step.

    In fp32 the partition is the master, so that a step reads 8 B.
    """
    strategy, marks = SmartInfinityStrategy(tmp_path / "storage", transfer=TransferConfig(direct_io="on")), []

    def mark(*_: Any) -> None:
        strategy.drain()
        lines = Path("/proc/self/io").read_text().splitlines()
        system = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        ours = strategy.traffic()
        marks.append(
            [system["read_bytes"], ours.shared_read_bytes, system["write_bytes"], ours.shared_write_bytes],
        )

    callback = LambdaCallback(on_train_start=mark, on_train_end=mark)
    module = LitTiny(Recipe(precision=precision, width=256, max_steps=4))
    quiet_trainer(tmp_path, strategy, precision=precision, max_steps=4, callbacks=[callback]).fit(module)
    updates = 4 * strategy.state_numel
    strategy.close()
    moved = [(last - first) / updates for first, last in zip(*marks, strict=True)]
    assert all(read <= figure < read + 0.5 for figure in moved[:2])
    assert all(12 <= figure < 12.5 for figure in moved[2:])


class Numbered(DataLoader[Any]):
    """A loader with a state of the user's own."""

    loaded: ClassVar[list[object]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def test_checkpoints_hold_the_states_of_the_users_loaders_alone(tmp_path: Path) -> None:
    """Positions of plain loaders are elsewhere: a checkpoint has what Lightning alone would have there."""

    class Two(Everything):
        def train_dataloader(self) -> Any:
            batches = list(super().train_dataloader())
            return CombinedLoader([DataLoader(batches, None), Numbered(batches, None)], "min_size")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            saved.extend(checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"])

    saved: list[object] = []
    save = Hook(1, lambda trainer: trainer.save_checkpoint(tmp_path / "middle.ckpt"))
    quiet_trainer(tmp_path, max_steps=2, callbacks=[save]).fit(Two())
    quiet_trainer(tmp_path, max_steps=3).fit(Two(), ckpt_path=tmp_path / "middle.ckpt")
    assert saved == Numbered.loaded == [{"mine": 1}]
