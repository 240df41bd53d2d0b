"""A plain DataLoader that keeps its position goes on within an epoch as if it had never stopped."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
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
from lightning_smartinfinity.resume.typed_json import decode, encode
from tests.helpers.long_cases import long_but

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


@pytest.mark.parametrize("drains", long_but([True], [False, True]))
@pytest.mark.parametrize("data", long_but([Noisy], [Plain, Noisy]))
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
    check_every_stop(WORKERS[name], drains=False, every=5)


def stopped(loader: Any, num_batches: int) -> tuple[Any, Any]:
    """Return the state of a loader after some batches, and the batches after them."""
    iterator = iter(keeping_position(loader))
    for _ in range(num_batches):
        next(iterator)
    state = copy.deepcopy(loader.state_dict())
    return state, [batch.tolist() for batch in iterator]


def rest(loader: Any, state: Any) -> list[Any]:
    keeping_position(loader).load_state_dict(state)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("now", [0, 1])
@pytest.mark.parametrize("given", [None, 5])
def test_another_number_of_workers(saved: int, now: int, given: int | None) -> None:
    """The order goes on even if the resumed run has workers and the saved one had none, or the other way round."""

    def make(num_workers: int) -> DataLoader[Any]:
        own = None if given is None else generator(given)
        return DataLoader(Plain(), 2, shuffle=True, num_workers=num_workers, generator=own)

    seed(1)
    state, left = stopped(make(saved), 2)
    seed(9)
    assert rest(make(now), state) == left


def test_a_resumed_run_can_be_stopped_again() -> None:
    """Positions count from the epoch's first batch, however often the run was resumed."""
    seed(1)
    state, left = stopped(DataLoader(Plain(), 2, shuffle=True), 1)
    for number in range(1, 5):
        seed(number)
        loader = keeping_position(DataLoader(Plain(), 2, shuffle=True))
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        iterator = iter(loader)
        assert loader.state_dict() == state
        assert next(iterator).tolist() == left[number - 1]
        state = loader.state_dict()
        assert state["num_fetched"] == number + 1


@pytest.mark.parametrize("data", [Plain, SizedStream])
def test_what_is_left_leaves_global_generators_alone(data: Callable[[], Any]) -> None:
    """Creating a resumed iterator draws nothing, and fetching from it only what the batch draws."""
    seed(1)
    state, _ = stopped(DataLoader(data(), 2, num_workers=1), 2)
    seed(9)
    loader = keeping_position(DataLoader(data(), 2, num_workers=1))
    loader.load_state_dict(state)
    next(iter(loader))
    drawn = float(torch.rand(())), random.random(), np.random.rand()
    seed(9)
    assert drawn == (float(torch.rand(())), random.random(), np.random.rand())


def test_a_state_from_before_the_first_iteration() -> None:
    """It skips nothing. The user's generators go on from it."""
    loader = keeping_position(DataLoader(Plain(), 2, shuffle=True, generator=generator(3)))
    state = copy.deepcopy(loader.state_dict())
    order = [batch.tolist() for batch in loader]
    assert rest(DataLoader(Plain(), 2, shuffle=True, generator=generator(4)), state) == order


def test_an_epoch_that_a_caller_ended_early() -> None:
    """begin_epoch lets the next iteration begin with the first batch. It leaves other objects alone."""
    state, _ = stopped(DataLoader(Plain(), 3), 2)
    loader = keeping_position(DataLoader(Plain(), 3))
    loader.load_state_dict(state)
    begin_epoch(loader)
    begin_epoch([])
    begin_epoch(DataLoader(Plain()))
    assert len(list(loader)) == len(loader) == 4


def test_a_loader_that_loses_its_iterator_between_epochs() -> None:
    """Lightning ends persistent workers after a fit. The next iteration begins an epoch with new ones."""
    loader = keeping_position(DataLoader(Plain(), 4, num_workers=1, persistent_workers=True))
    first = [batch.tolist() for batch in loader]
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert [batch.tolist() for batch in loader] == first


class OwnState(DataLoader[Any]):
    """A loader of the user's that keeps its position by itself."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("loader", [[1, 2], None, OwnState(Plain())], ids=["list", "none", "own state"])
def test_other_loaders_are_left_alone(loader: Any) -> None:
    """Only a DataLoader without own methods is changed."""
    kind = type(loader)
    assert keeping_position(loader) is loader
    assert type(loader) is kind


@pytest.mark.parametrize("kind", [DataLoader, Doubling])
def test_a_loader_looks_as_before(kind: type[DataLoader[Any]]) -> None:
    """The loader keeps its length and options. Its class becomes a subclass of the same name, which is made once."""
    loader, other = kind(Plain(), 3), kind(Plain(), 3)
    assert keeping_position(keeping_position(loader)) is loader
    assert isinstance(loader, kind)
    assert type(loader) is type(keeping_position(other)) is not kind
    names = [(made.__module__, made.__qualname__, made.__name__) for made in (type(loader), kind)]
    assert names[0] == names[1]
    assert len(loader) == len(iter(loader)) == 4
    assert callable(loader.state_dict)  # type: ignore[attr-defined]


def test_an_instance_that_lightning_makes_again_keeps_its_position() -> None:
    """The class is enough: Lightning calls it again to put another sampler in."""
    again: Any = type(keeping_position(DataLoader(Plain(), 3)))(Plain(), 3)
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
    assert type(found) is DataLoader
    assert keeping_position(found).state_dict()["num_fetched"] == 0
    assert len(list(found)) == 4
    assert list(copied(iterator)) == []


def test_options_are_kept() -> None:
    """The rest of an epoch is collated, and its workers are begun, by the user's functions."""
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 3, "timeout": 60, "worker_init_fn": worker_begins}
    options |= {"collate_fn": tuple, "multiprocessing_context": "fork", "persistent_workers": True}
    saved = keeping_position(DataLoader(Shown(), 3, **options))
    next(iter(saved))
    loader = keeping_position(DataLoader(Shown(), 3, **options))
    loader.load_state_dict(saved.state_dict())
    assert list(loader) == [((3, "begun"), (4, "begun"), (5, "begun")), ((6, "begun"), (7, "begun"), (8, "begun"))]
    iterator = loader._iterator
    assert iterator._prefetch_factor == 3
    assert iterator._timeout == 60
    assert len(list(loader)) == 3
    assert loader._iterator is iterator


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_an_iterator_that_is_left_goes_at_once(is_resumed: bool, persistent_workers: bool) -> None:
    """Nothing refers to itself, so workers end with the last reference to their iterator or loader."""
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent_workers}
    loader = keeping_position(DataLoader(Plain(), 3, **options))
    if is_resumed:
        next(iter(loader))
        state = loader.state_dict()
        loader = keeping_position(DataLoader(Plain(), 3, **options))
        loader.load_state_dict(state)
    iterator = iter(loader)
    next(iterator)
    left = weakref.ref(iterator._batches)
    gc.disable()
    try:
        del iterator
        if persistent_workers:
            del loader
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


def test_a_state_is_plain(tmp_path: Path) -> None:
    """A state can be written as typed JSON, and read by torch.load with weights_only."""
    state, left = stopped(DataLoader(Plain(), 3, shuffle=True, generator=generator()), 2)
    torch.save(state, tmp_path / "state.pt")
    for found in (torch.load(tmp_path / "state.pt", weights_only=True), decode(encode(state))):
        assert rest(DataLoader(Plain(), 3, shuffle=True, generator=generator(1)), found) == left


def test_indices_that_a_sampler_draws_one_by_one() -> None:
    """A sampler that needs no more than the present random state goes on, too."""
    check_every_stop(lambda: DataLoader(Noisy(), 3, sampler=Drawing()), drains=False)
