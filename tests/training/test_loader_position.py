"""A plain DataLoader that keeps its position goes on within an epoch, and is else the loader that it was."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_smartinfinity.resume.loader_position import begin_epoch, keeping_position
from lightning_smartinfinity.resume.typed_json import decode, encode
from tests.helpers.long_cases import long_but
from tests.training.loaders import (
    LOADERS,
    STREAMS,
    WORKERS,
    Doubling,
    Drawing,
    Noisy,
    Plain,
    generator,
    rest,
    seed,
    stopped,
)

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
        begin_epoch(run.loader)
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
        if number % every == 0:
            told = f"stopped in epoch {stop.epoch} after {stop.num_steps} steps"
            assert resumed(make(), stop, begun, drains=drains) == plain[stop.num_steps :], told


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


@pytest.mark.parametrize("name", long_but(["shuffle", "persistent, generator", "own loader", "stream"], WORKERS))
def test_the_order_goes_on_with_workers(name: str) -> None:
    """Workers that live for an epoch or for all of them get the rest of the order, and then the next orders."""
    check_every_stop(WORKERS[name], drains=False, every=5)


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
    for number, batch in enumerate(left, 1):
        seed(number)
        loader = keeping_position(DataLoader(Plain(), 2, shuffle=True))
        loader.load_state_dict(state)
        iterator = iter(loader)
        assert loader.state_dict() == state and state["num_fetched"] == number
        assert next(iterator).tolist() == batch
        state = loader.state_dict()


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


def test_a_loader_that_loses_its_iterator_between_epochs() -> None:
    """Lightning ends persistent workers after a fit. The next iteration begins an epoch with new ones."""
    loader = keeping_position(DataLoader(Plain(), 4, num_workers=1, persistent_workers=True))
    first = [batch.tolist() for batch in loader]
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert [batch.tolist() for batch in loader] == first


def test_indices_that_a_sampler_draws_one_by_one() -> None:
    """A sampler that needs no more than the present random state goes on, too."""
    check_every_stop(lambda: DataLoader(Noisy(), 3, sampler=Drawing()), drains=False)


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
    assert len(list(keeping_position(found))) == 4
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
