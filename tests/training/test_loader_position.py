"""A plain DataLoader that keeps its position goes on within an epoch as if it had never stopped."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
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
NUM_EPOCHS = 3


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
    return DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=70, **options))


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


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def global_states() -> Any:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def restore(states: Any) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def step(batch: torch.Tensor) -> list[float]:
    """Return a batch and what a training step draws after it."""
    return [*batch.flatten().tolist(), float(torch.rand(())), random.random(), float(np.random.rand())]


@dataclass
class Stop:
    """A point at which a run may have been stopped."""

    epoch: int
    is_within: bool
    state: Any
    states: Any
    num_steps: int


class Run:
    """A loop of epochs.

    It fetches until the loader ends (``drains``), or, as Lightning does, as many batches as the loader's length says.
    """

    def __init__(self, loader: Any, *, drains: bool) -> None:
        self.loader, self.drains = loader, drains
        self.steps: list[Any] = []
        self.stops: list[Stop] = []

    def go(self, epoch: int = 0, iterator: Any = None, states: Any = None) -> list[Any]:
        for number in range(epoch, NUM_EPOCHS):
            if iterator is None:
                self.set_epoch(number)
                iterator = iter(self.loader)
            if states is not None:
                restore(states)
            states = None
            self.one_epoch(number, iterator)
            iterator = None
        return self.steps

    def one_epoch(self, number: int, iterator: Any) -> None:
        self.note(number, is_within=True)
        begun = len(self.steps)
        for batch in iterator:
            self.steps.append(step(batch))
            is_last = not self.drains and (len(self.steps) - begun + self.before(number)) == len(self.loader)
            self.note(number + is_last, is_within=not is_last)
            if is_last:
                return
        self.note(number + 1, is_within=False)

    def before(self, number: int) -> int:
        return self.used if number == self.first_epoch else 0

    used, first_epoch = 0, -1

    def note(self, epoch: int, *, is_within: bool) -> None:
        if hasattr(self.loader, "state_dict"):
            state = copy.deepcopy(self.loader.state_dict())
            self.stops.append(Stop(epoch, is_within, state, global_states(), len(self.steps)))

    def set_epoch(self, number: int) -> None:
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(number)


def resumed(loader: Any, stop: Stop, begun: int, *, drains: bool, num_iterators: int = 2) -> list[Any]:
    """Return the steps of a run in a new process, which restores random states after the loader's iterator exists."""
    seed(99)
    torch.rand(7)
    run = Run(keeping_position(loader), drains=drains)
    run.loader.load_state_dict(copy.deepcopy(stop.state))
    if not stop.is_within:
        iter(run.loader)
        restore(stop.states)
        return run.go(stop.epoch)
    run.used, run.first_epoch = stop.num_steps - begun, stop.epoch
    for _ in range(num_iterators):
        iterator = iter(run.loader)
    run.set_epoch(stop.epoch)
    return run.go(stop.epoch, iterator, stop.states)


def check_every_stop(make: Callable[[], DataLoader[Any]], *, drains: bool, every: int = 1) -> None:
    seed(1)
    plain = Run(make(), drains=drains).go()
    seed(1)
    straight = Run(keeping_position(make()), drains=drains)
    assert straight.go() == plain
    begun = 0
    for number, stop in enumerate(straight.stops):
        if number and straight.stops[number - 1].epoch != stop.epoch:
            begun = stop.num_steps
        is_drained_later = drains and stop.is_within and not stop.state["is_within"] and stop.num_steps > begun
        if number % every == 0 and not is_drained_later:
            told = f"stopped in epoch {stop.epoch} after {stop.num_steps} steps"
            assert resumed(make(), stop, begun, drains=drains) == plain[stop.num_steps :], told


@pytest.mark.parametrize("drains", [False, True], ids=["by length", "to the end"])
@pytest.mark.parametrize("data", [Plain, Noisy])
@pytest.mark.parametrize("name", LOADERS)
def test_goes_on_after_every_batch(name: str, data: type[Plain], drains: bool) -> None:
    """The rest of the epoch and the next epochs are those of a run that never stopped, as are all random draws."""
    check_every_stop(
        lambda: LOADERS[name](data()), drains=drains, every=5 if "repl" in name or "sampler's" in name else 1
    )


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_after_every_batch(name: str) -> None:
    """Batches of an iterable dataset are fetched again and left out."""
    check_every_stop(STREAMS[name], drains=True)
    if "sized" in name:
        check_every_stop(STREAMS[name], drains=False)


@pytest.mark.parametrize("name", WORKERS)
def test_the_order_goes_on_with_workers(name: str) -> None:
    """Workers that live for an epoch or for all of them get the rest of the order, and then the next orders."""
    check_every_stop(WORKERS[name], drains=False, every=3)
