"""Validation, logging, checkpoint callbacks and traffic around the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything
from tests.helpers.trainers import quiet_trainer
from tests.training.worker import Run, train


class WithValidation(LitTiny):
    """A module that also validates and records its validation losses."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.validated: list[float] = []

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = self.model(batch)
        self.validated.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return self.recipe.loader()


def test_validation_inside_fit_leaves_training_undisturbed(tmp_path: Path) -> None:
    """Validating after every step changes no loss, sees the updated weights, and feeds ModelCheckpoint and loggers."""
    recipe = Recipe(precision="bf16-mixed", max_steps=4, epoch_batches=4, lr=3e-3)
    quiet, _, _ = train(Run(out=str(tmp_path / "quiet"), recipe=recipe))
    module = WithValidation(recipe)
    checkpoints = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", save_last=True, save_top_k=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SmartInfinityStrategy(tmp_path / "storage"),
        precision="bf16-mixed",
        max_steps=4,
        val_check_interval=1,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path),
        callbacks=[checkpoints, LearningRateMonitor()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module)
    assert module.losses == quiet.losses
    per_epoch = recipe.epoch_batches
    means = [sum(module.validated[i : i + per_epoch]) / per_epoch for i in range(0, len(module.validated), per_epoch)]
    assert len(set(means[1:])) == len(means[1:]), "validation saw the same weights twice"
    assert Path(checkpoints.best_model_path).is_dir()
    assert Path(checkpoints.last_model_path).is_dir()


class SystemBytes(pl.Callback):
    """A callback that reads how many bytes the kernel counts for this process during the steps."""

    def __init__(self) -> None:
        self.marks: list[dict[str, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._mark()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.strategy.drain()  # type: ignore[attr-defined]
        self._mark()

    def _mark(self) -> None:
        lines = Path("/proc/self/io").read_text().splitlines()
        self.marks.append({name: int(value) for name, value in (line.split(": ") for line in lines)})


def _traffic_per_parameter(precision: str, tmp_path: Path) -> tuple[float, float, float, float]:
    recipe = Recipe(precision=precision, width=256, max_steps=4)
    strategy = SmartInfinityStrategy(tmp_path / "storage", transfer=TransferConfig(direct_io="on"))
    system = SystemBytes()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_steps=4,
        callbacks=[system],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(LitTiny(recipe))
    updates = 4 * strategy.state_numel
    first, last = system.marks[0], system.marks[-1]
    traffic = strategy.traffic()
    strategy.close()
    written_at_start = 12 * strategy.state_numel
    return (
        (last["read_bytes"] - first["read_bytes"]) / updates,
        (last["write_bytes"] - first["write_bytes"]) / updates,
        traffic.shared_read_bytes / updates,
        (traffic.shared_write_bytes - written_at_start) / updates,
    )


def test_sixteen_bit_steps_move_twelve_bytes_each_way(tmp_path: Path) -> None:
    """The kernel's counters and ours show 12 to 12.5 B read and written per parameter and step."""
    for figure in _traffic_per_parameter("bf16-mixed", tmp_path):
        assert 12 <= figure < 12.5


def test_fp32_steps_do_not_read_the_masters(tmp_path: Path) -> None:
    """In fp32 the partition is the master, so that a step reads 8 B and writes 12 B per parameter."""
    system_read, system_write, read, write = _traffic_per_parameter("32-true", tmp_path)
    assert 8 <= system_read < 8.5
    assert 8 <= read < 8.5
    assert 12 <= system_write < 12.5
    assert 12 <= write < 12.5


class Numbered(DataLoader[Any]):
    """A loader with a state of the user's own."""

    loaded: ClassVar[list[object]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def test_checkpoints_hold_the_states_of_the_users_loaders_alone(tmp_path: Path) -> None:
    """Positions of plain loaders are for training records: a checkpoint has what Lightning alone would have there."""

    class Two(Everything):
        saves = False

        def train_dataloader(self) -> Any:
            batches = list(super().train_dataloader())
            return CombinedLoader([DataLoader(batches, None), Numbered(batches, None)], "min_size")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.saves:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")
                state = self.trainer.fit_loop.state_dict()["state_dict"]["combined_loader"]
                assert [sorted(one)[-1] for one in state] == ["seed", "mine"]
            return super().training_step(batch[0], batch_idx)

    module, resumed = Two(), Two()
    module.saves = True
    quiet_trainer(tmp_path, max_steps=2, accumulate_grad_batches=1).fit(module)
    with pytest.warns(UserWarning, match="Lightning replays the epoch's batches from the first"):
        quiet_trainer(tmp_path, max_steps=3).fit(resumed, ckpt_path=tmp_path / "middle.ckpt")
    assert Numbered.loaded == [{"mine": 1}]
