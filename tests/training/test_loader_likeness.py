"""A DataLoader that keeps its position is in everything else the loader that it was."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_smartinfinity.resume.loader_position import keeping_position
from lightning_smartinfinity.resume.typed_json import decode, encode
from tests.training.loaders import Doubling, Plain, generator, rest, stopped


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
