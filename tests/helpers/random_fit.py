"""A loader that draws its order and noise, and the seeds of all generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

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


def seed(value: int) -> None:
    """Seed torch's, numpy's and Python's generators."""
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)
