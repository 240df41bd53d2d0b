"""A fit that draws random numbers wherever one may: order of batches, augmentation, dropout, hooks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES = 12
BATCH_SIZE = 3


class Noisy(Dataset[torch.Tensor]):
    """Samples that differ every time they are read: by torch's, numpy's and Python's generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) + np.random.rand() + random.random()
        return torch.full((4,), float(index)) / NUM_SAMPLES + noise


class StatefulLoader:
    """Shuffles, and goes on within an epoch after ``load_state_dict``, as torchdata's StatefulDataLoader does."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.seed, self.batch, self.resumed = 0, 0, False

    def __len__(self) -> int:
        return NUM_SAMPLES // BATCH_SIZE // self.world_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.resumed:
            self.seed, self.batch = int(torch.empty((), dtype=torch.int64).random_()), 0
        self.resumed = False
        return self._batches(torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.seed)).tolist())

    def _batches(self, order: list[int]) -> Iterator[torch.Tensor]:
        data = Noisy()
        while self.batch < len(self):
            start = (self.batch * self.world_size + self.rank) * BATCH_SIZE
            self.batch += 1
            yield torch.stack([data[index] for index in order[start : start + BATCH_SIZE]])

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.batch, self.resumed = state["seed"], state["batch"], True


class LitRandom(pl.LightningModule):
    """Trains with random draws; ``losses`` holds (epoch, batch, loss) of every batch.

    Args:
        stateful: Train on a :class:`StatefulLoader` instead of a plain DataLoader.
        validate: Validate, too.
    """

    def __init__(self, *, stateful: bool = False, validate: bool = False) -> None:
        super().__init__()
        self.stateful, self.validate = stateful, validate
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.losses: list[tuple[int, int, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        self.losses.append((self.trainer.current_epoch, batch_idx, float(loss.detach())))
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        if self.stateful:
            return StatefulLoader(self.global_rank, self.trainer.world_size)
        return DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=BATCH_SIZE) if self.validate else []


class SaveAt(pl.Callback):
    """Saves ``<point>.ckpt`` at points of the fit: ``<hook>-<epoch>-<batches so far>``."""

    def __init__(self, folder: Path, *points: str) -> None:
        self.folder, self.points = folder, points

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "epoch")

    def _save(self, trainer: pl.Trainer, hook: str) -> None:
        point = f"{hook}-{trainer.current_epoch}-{trainer.fit_loop.batch_idx + 1}"
        if point in self.points:
            trainer.save_checkpoint(self.folder / f"{point}.ckpt")


def seed(value: int) -> None:
    """Seed every generator that a :class:`LitRandom` draws from."""
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)
