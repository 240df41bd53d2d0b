"""A plain DataLoader that keeps its position goes on within an epoch as if it had never stopped."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_smartinfinity.resume.loader_position import begin_epoch, keeping_position
from tests.helpers.long_cases import long_but
from tests.training.loaders import (
    LOADERS,
    STREAMS,
    WORKERS,
    Drawing,
    Noisy,
    Plain,
    SizedStream,
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


def test_indices_that_a_sampler_draws_one_by_one() -> None:
    """A sampler that needs no more than the present random state goes on, too."""
    check_every_stop(lambda: DataLoader(Noisy(), 3, sampler=Drawing()), drains=False)
