"""A strategy that counts made-up traffic, and a model to train with it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smartinfinity.devices.base import Traffic

PER_STEP = Traffic(
    steps=1,
    numel=1_000,
    shared_read_bytes=12_000,
    shared_write_bytes=14_000,
    internal_read_bytes=1_000,
    internal_write_bytes=500,
    storage_write_bytes=12_500,  # excludes writes to a device's memory
    cached_read_bytes=3_000,
    cached_write_bytes=2_000,
    background_read_bytes=6_000,
    read_calls=3,
    write_calls=4,
    read_seconds=0.5,
    write_seconds=0.75,
    compute_seconds=0.25,
    wait_seconds=0.125,
    io_cpu_seconds=0.0625,
)
INITIALISATION = Traffic(shared_write_bytes=12_000_000, storage_write_bytes=12_000_000)
CHECKPOINT = Traffic(shared_read_bytes=9_000_000, wait_seconds=60.0)


class CountingStrategy(SingleDeviceStrategy):
    """Plain training in which every optimizer step, checkpoint and fit counts a known number of bytes."""

    def __init__(self, skipped_steps: tuple[int, ...] = ()) -> None:
        super().__init__(device="cpu")
        self.skipped_steps = skipped_steps
        self.num_steps = 0
        self.counted = Traffic()

    def traffic(self) -> Traffic:
        return self.counted

    @property
    def host_bytes(self) -> dict[str, int]:
        return {"ring": 3_000, "residual": 1_000}

    def drain(self) -> None:
        """Do nothing, since nothing runs beside training."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.counted = INITIALISATION  # counters restart with every store

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self.num_steps not in self.skipped_steps:
            self.counted = self.counted + PER_STEP
        self.num_steps += 1
        return result

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.counted = self.counted + CHECKPOINT
        super().save_checkpoint(*args, **kwargs)


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Line(pl.LightningModule):
    """A model with one linear layer whose batches and validations take fixed time on the clock."""

    def __init__(self, clock: Clock | None = None, *, num_batches: int = 8, validation_seconds: float = 100.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.clock = clock or Clock()
        self.num_batches = num_batches
        self.validation_seconds = validation_seconds

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.clock.now += 2.0
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.clock.now += self.validation_seconds

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(self.num_batches, 4)), batch_size=1)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(1, 4)), batch_size=1)
