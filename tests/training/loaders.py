"""Data sets, samplers and loaders of all kinds, for tests of a loader's position."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_smartinfinity.resume.loader_position import keeping_position

NUM_SAMPLES = 11


class Plain(Dataset[torch.Tensor]):
    """Samples that are their numbers."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Noisy(Plain):
    """Samples that differ every time they are read, by three generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(1) + random.random() + np.random.rand()


class Stream(IterableDataset[torch.Tensor]):
    """Samples in an order that is drawn when the epoch begins, and noise."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(NUM_SAMPLES).tolist():
            yield torch.tensor([float(index)]) + torch.rand(1)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return NUM_SAMPLES


class Eager:
    """A sampler that draws when it is iterated, and not when the first index is fetched."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_SAMPLES).tolist())


class EagerBatches(Eager):
    """A batch sampler of this kind, with batches of several sizes."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(NUM_SAMPLES).tolist()
        return iter([order[:1], order[1:5], order[5:7], order[7:]])


class Drawing:
    """A sampler that draws each index when it is asked for it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield random.randrange(NUM_SAMPLES)


class Doubling(DataLoader[torch.Tensor]):
    """A loader of the user's that changes batches."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def replacing(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=40, **options))


def distributed(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=1), **options)


def with_own_generator(data: Any) -> DataLoader[Any]:
    shared = generator()
    return DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, generator=shared), generator=shared)


WEIGHTS = [1.0 + index for index in range(NUM_SAMPLES)]
LOADERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "shuffle": lambda data: DataLoader(data, 3, shuffle=True),
    "whole batches": lambda data: DataLoader(data, 1, shuffle=True),
    "drop last": lambda data: DataLoader(data, 4, shuffle=True, drop_last=True),
    "sequential": lambda data: DataLoader(data, 3),
    "weighted": lambda data: DataLoader(data, 3, sampler=WeightedRandomSampler(WEIGHTS, 10)),
    "subset": lambda data: DataLoader(data, 2, sampler=SubsetRandomSampler(range(3, 9))),
    "replacement": replacing,
    "distributed": distributed,
    "batch sampler": lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=True)),
    "eager": lambda data: DataLoader(data, 2, sampler=Eager()),
    "drawing": lambda data: DataLoader(data, 3, sampler=Drawing()),
    "eager batches": lambda data: DataLoader(data, batch_sampler=EagerBatches()),  # type: ignore[arg-type]
    "no batches": lambda data: DataLoader(data, batch_size=None, shuffle=True),
    "eager without batches": lambda data: DataLoader(data, batch_size=None, sampler=Eager()),
    "generator": lambda data: DataLoader(data, 3, shuffle=True, generator=generator()),
    "generator whole": lambda data: DataLoader(data, 1, shuffle=True, generator=generator()),
    "shared generator": with_own_generator,
    "sampler's generator": lambda data: replacing(data, generator=generator()),
    "own loader": lambda data: Doubling(data, 3, shuffle=True),
    "own loader, generator": lambda data: Doubling(data, 3, shuffle=True, generator=generator()),
}
STREAMS: dict[str, Callable[[], DataLoader[Any]]] = {
    "stream": lambda: DataLoader(Stream(), 3),
    "sized stream": lambda: DataLoader(SizedStream(), 3),
    "stream without batches": lambda: DataLoader(Stream(), batch_size=None),
    "stream, generator": lambda: DataLoader(SizedStream(), 3, generator=generator()),
}
WORKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(Plain(), 2, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(Plain(), 2, shuffle=True, num_workers=1, generator=generator()),
    "eager": lambda: DataLoader(Plain(), 2, sampler=Eager(), num_workers=1, prefetch_factor=1),
    "persistent": lambda: DataLoader(Plain(), 3, shuffle=True, num_workers=2, persistent_workers=True),
    "persistent, generator": lambda: DataLoader(
        Plain(), 4, shuffle=True, num_workers=1, persistent_workers=True, generator=generator()
    ),
    "distributed": lambda: distributed(Plain(), num_workers=1, persistent_workers=True),
    "own loader": lambda: Doubling(Plain(), 4, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(SizedStream(), 4, num_workers=1),
}


def stopped(loader: Any, num_batches: int) -> tuple[Any, Any]:
    """Return the state of a loader after some batches, and the batches after them."""
    iterator = iter(keeping_position(loader))
    for _ in range(num_batches):
        next(iterator)
    state = copy.deepcopy(loader.state_dict())
    return state, [batch.tolist() for batch in iterator]


def rest(loader: Any, state: Any) -> list[Any]:
    """Return the batches of a loader that goes on from a state."""
    keeping_position(loader).load_state_dict(state)
    return [batch.tolist() for batch in loader]
