"""A plain DataLoader that keeps its position goes on within an epoch, and is else the loader that it was."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
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

from lightning_smartinfinity.resume.loader_position import begin_epoch, keeping_position
from tests.helpers.long_cases import long_but
from tests.helpers.random_fit import seed

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


LOADERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "shuffle": lambda data: DataLoader(data, 3, shuffle=True),
    "whole batches": lambda data: DataLoader(data, 1, shuffle=True),
    "drop last": lambda data: DataLoader(data, 4, shuffle=True, drop_last=True),
    "sequential": lambda data: DataLoader(data, 3),
    "weighted": lambda data: DataLoader(data, 3, sampler=WeightedRandomSampler(range(1, NUM_SAMPLES + 1), 10)),
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
    return copy.deepcopy(loader.state_dict()), [batch.tolist() for batch in iterator]


def rest(loader: Any, state: Any) -> list[Any]:
    """Return the batches of a loader that goes on from a state."""
    keeping_position(loader).load_state_dict(state)
    return [batch.tolist() for batch in loader]


NUM_EPOCHS = 3


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
    used: int | None  # batches of the epoch, or None between epochs
    state: Any
    states: Any
    num_steps: int


class Run:
    """Epochs, from one on, which fetch until the loader ends (``drains``) or as many batches as its length says.

    Attributes:
        steps: What was drawn in each step.
        stops: Points at which it may have been stopped.
    """

    def __init__(self, loader: Any, *, drains: bool, epoch: int = 0) -> None:
        self.loader, self.drains, self.epoch = loader, drains, epoch
        self.steps: list[Any] = []
        self.stops: list[Stop] = []

    def go(self, iterator: Any = None, states: Any = None, used: int = 0) -> list[Any]:
        """Go on with an iterator of the first epoch, of which some batches were used, and with random states."""
        for epoch in range(self.epoch, NUM_EPOCHS):
            set_epoch(self.loader, epoch)
            iterator = iter(self.loader) if iterator is None else iterator
            if states is not None:
                restore(states)
            self.note(epoch, used)
            for batch in iterator:
                self.steps.append(step(batch))
                used += 1
                if not self.drains and used == len(self.loader):
                    break
                self.note(epoch, used)
            self.note(epoch + 1, None)
            iterator, states, used = None, None, 0
        return self.steps

    def note(self, epoch: int, used: int | None) -> None:
        if hasattr(self.loader, "state_dict"):
            state = copy.deepcopy(self.loader.state_dict())
            self.stops.append(Stop(epoch, used, state, global_states(), len(self.steps)))


def set_epoch(loader: Any, number: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(number)


def resumed(loader: Any, stop: Stop, *, drains: bool) -> list[Any]:
    """Return the steps of a run in a new process, which restores random states after the loader's iterator exists."""
    seed(99)
    torch.rand(7)
    run = Run(keeping_position(loader), drains=drains, epoch=stop.epoch)
    run.loader.load_state_dict(copy.deepcopy(stop.state))
    if stop.used is None:
        begin_epoch(run.loader)
        iter(run.loader)
        restore(stop.states)
        return run.go()
    iter(run.loader)  # as Lightning does
    return run.go(iter(run.loader), stop.states, stop.used)


def check_every_stop(make: Callable[[], DataLoader[Any]], *, drains: bool, every: int = 1) -> None:
    seed(1)
    plain = Run(make(), drains=drains).go()
    seed(1)
    straight = Run(keeping_position(make()), drains=drains)
    assert straight.go() == plain
    for stop in straight.stops[::every]:
        told = f"stopped in epoch {stop.epoch} after {stop.num_steps} steps"
        assert resumed(make(), stop, drains=drains) == plain[stop.num_steps :], told


# The others of these kinds always run.
COMBINED = ("eager without batches", "generator whole", "own loader, generator")


@pytest.mark.parametrize("drains", long_but([True], [False, True]))
@pytest.mark.parametrize("data", long_but([Noisy], [Plain, Noisy]))
@pytest.mark.parametrize("name", long_but([name for name in LOADERS if name not in COMBINED], LOADERS))
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


@pytest.mark.parametrize("name", long_but(["shuffle", "persistent, generator", "stream"], WORKERS))
def test_the_order_goes_on_with_workers(name: str) -> None:
    """Workers that live for an epoch or for all of them get the rest of the order, and then the next orders."""
    check_every_stop(WORKERS[name], drains=False, every=7)


@pytest.mark.parametrize("given", [None, 5])
@pytest.mark.parametrize(("saved", "now"), [(0, 1), (2, 0)])
def test_another_number_of_workers(saved: int, now: int, given: int | None) -> None:
    """The order goes on even if the resumed run has workers and the saved one had none, or the other way round."""

    def make(num_workers: int, own: int | None) -> DataLoader[Any]:
        return DataLoader(Plain(), 2, shuffle=True, num_workers=num_workers, generator=own and generator(own))

    seed(1)
    state, left = stopped(make(saved, given), 2)
    seed(9)
    assert rest(make(now, given and 9), state) == left


def test_a_state_from_before_the_first_iteration() -> None:
    """It skips nothing. The user's generators go on from it."""
    loader = keeping_position(DataLoader(Plain(), 2, shuffle=True, generator=generator(3)))
    state = copy.deepcopy(loader.state_dict())
    order = [batch.tolist() for batch in loader]
    assert rest(DataLoader(Plain(), 2, shuffle=True, generator=generator(4)), state) == order


def test_an_epoch_that_a_caller_ended_early() -> None:
    """begin_epoch lets the next iteration begin with the first batch. It leaves other objects alone."""
    loader = keeping_position(DataLoader(Plain(), 3))
    loader.load_state_dict(stopped(DataLoader(Plain(), 3), 2)[0])
    for each in (loader, [], DataLoader(Plain())):
        begin_epoch(each)
    assert len(list(loader)) == len(loader) == 4


class OwnState(DataLoader[Any]):
    """A loader of the user's that keeps its position by itself."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("loader", [[1, 2], None, OwnState(Plain())], ids=["list", "none", "own state"])
def test_other_loaders_are_left_alone(loader: Any) -> None:
    """Only a DataLoader without own methods is changed."""
    kind = type(loader)
    assert keeping_position(loader) is loader and type(loader) is kind


def test_an_instance_that_lightning_makes_again_keeps_its_position() -> None:
    """The class is enough, a subclass of the same name: Lightning calls it again to put another sampler in."""
    kind: Any = type(keeping_position(Doubling(Plain(), 3)))
    assert issubclass(kind, Doubling) and kind.__name__ == "Doubling"
    again = kind(Plain(), 3)
    next(iter(again))
    assert again.state_dict()["num_fetched"] == 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_copies_are_loaders_of_the_first_class(copied: Callable[[Any], Any]) -> None:
    """A loader can be copied within an epoch. The copy has no position."""
    loader = keeping_position(DataLoader(Plain(), 3))
    iterator = iter(loader)
    next(iterator)
    found = copied(loader)
    assert type(found) is DataLoader and len(list(keeping_position(found))) == 4 and list(copied(iterator)) == []


def test_options_are_kept() -> None:
    """The rest of an epoch is collated, and its workers are begun, by the user's functions."""
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 3, "timeout": 60, "worker_init_fn": worker_begins}
    options |= {"collate_fn": tuple, "multiprocessing_context": "fork", "persistent_workers": True}
    saved = keeping_position(DataLoader(Shown(), 3, **options))
    next(iter(saved))
    loader = keeping_position(DataLoader(Shown(), 3, **options))
    loader.load_state_dict(saved.state_dict())
    assert (
        list(loader) == [((3, "begun"), (4, "begun"), (5, "begun")), ((6, "begun"), (7, "begun"), (8, "begun"))]
        and (loader._iterator._prefetch_factor, loader._iterator._timeout) == (3, 60)
        and len(list(loader)) == 3
    )


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_left_goes_at_once(is_resumed: bool, persistent: bool) -> None:
    """Nothing refers to itself, so workers end with the last reference to their iterator or loader."""
    loaders = [keeping_position(DataLoader(Plain(), 3, num_workers=1, persistent_workers=persistent)) for _ in "ab"]
    if is_resumed:
        loaders[0].load_state_dict(stopped(loaders.pop(), 1)[0])
    iterator = iter(loaders[0])
    next(iterator)
    left = weakref.ref(iterator._batches)
    gc.disable()
    try:
        del iterator
        if persistent:
            loaders.clear()
        assert left() is None
    finally:
        gc.enable()


class Shown(Dataset[Any]):
    """Samples that tell whether the worker's initialization has run."""

    told = ""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return index, Shown.told


def worker_begins(worker: int) -> None:
    Shown.told = "begun"
