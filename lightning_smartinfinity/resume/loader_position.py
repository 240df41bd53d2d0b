"""Makes a plain DataLoader resumable within an epoch, by the number of batches and the random states of their order.

An epoch's order is drawn from random generators, when the iterator is created or when it fetches its first batch. The
loader's state holds the generators' states at both moments, and the number of batches fetched. A loader that has loaded
a state draws the order again, skips these batches, and leaves all generators as they were.

    saved                   next ``__iter__`` after loading
    before the first batch  begins an epoch
    within an epoch         continues with the next batch
    after the last batch    ends at once, as the saved epoch would have; see :func:`begin_epoch`
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_smartinfinity.resume.random_states import global_states, restore_globals

__all__ = [
    "begin_epoch",
    "is_of_other_data",
    "is_position",
    "keeping_position",
    "keeps_position",
    "with_shared_once",
]

_KEPT = "_kept_position"  # Lightning ignores attributes with an underscore when it recreates a loader
_MARK = "_keeps_position"
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def keeping_position(loader: Any) -> Any:
    """Give a DataLoader ``state_dict`` and ``load_state_dict``, with which it can resume within an epoch.

    The loader becomes an instance of a subclass of its class with the same name. Without a loaded state, it draws the
    same random numbers as before.

    Args:
        loader: Any object. It is changed only if it is a ``torch.utils.data.DataLoader`` that has neither method.

    Returns:
        The same object.
    """
    own = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
    if isinstance(loader, DataLoader) and not any(map(callable, own)):
        loader.__class__ = _keeping_class(cast(Any, type(loader)))
    return loader


def keeps_position(loader: Any) -> bool:
    """Return whether a loader's state is that of :func:`keeping_position`, and not the loader's own."""
    return hasattr(type(loader), _MARK)


def is_position(state: Any) -> bool:
    """Return whether a loader's state was saved by a loader of :func:`keeping_position`."""
    return isinstance(state, dict) and {"is_within", "num_fetched", "generators", "is_alive"} <= state.keys()


def is_of_other_data(loader: Any, state: dict[str, Any]) -> bool:
    """Return whether a position within an epoch was saved with another number of samples or another batch size."""
    return bool(state["is_within"]) and any(state.get(name, size) != size for name, size in _sizes(loader).items())


def with_shared_once(loaders: list[Any], states: list[Any]) -> list[Any]:
    """Return the states of loaders, changed so that only the first of those that share a generator restores it.

    They draw from it in turn; if each restored it, the draws of those before would be undone.
    """
    seen: set[int] = set()
    changed = []
    for loader, state in zip(loaders, states, strict=False):
        if keeps_position(loader) and is_position(state):
            own = zip(map(id, _generators(loader)), state["generators"], strict=False)
            state = {**state, "generators": [None if key in seen else one for key, one in own]}
            seen.update(map(id, _generators(loader)))
        changed.append(state)
    return changed


def begin_epoch(loader: Any) -> None:
    """Make the next ``__iter__`` begin an epoch, even if the loaded state is from within one.

    Call this if the state was saved after the last batch of an epoch, before another batch was requested. The loader
    cannot know which batch was the last: ``limit_train_batches`` may end the epoch, or a loader that it is combined
    with. Other objects than results of :func:`keeping_position` do not change.
    """
    if _KEPT in getattr(loader, "__dict__", {}) and (state := _kept(loader).pending) is not None:
        loader.load_state_dict(_state_between_epochs(state["generators"], state["is_alive"]))


@functools.cache
def _keeping_class(base: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    def iterate(self: Any) -> Iterator[Any]:
        return _kept(self).iterate(self, functools.partial(base.__iter__, self))

    def state_dict(self: Any) -> dict[str, Any]:
        """Return the position within the epoch and the random states that its order was drawn from."""
        return _kept(self).state(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Make the next ``__iter__`` continue from a result of ``state_dict``."""
        _kept(self).load(self, state_dict)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Pickle looks the class up by its name, and would find the base.
        reduced: Any = base.__reduce_ex__(self, protocol)
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_blank, (base, *reduced[1][1:]), *reduced[2:])
        return reduced

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods: dict[str, Any] = {"__iter__": iterate, "__reduce_ex__": reduce_ex}
    methods |= {"state_dict": state_dict, "load_state_dict": load_state_dict, _MARK: True}
    return types.new_class(base.__name__, (base,), exec_body=lambda body: body.update({**names, **methods}))


def _blank(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def _kept(loader: Any) -> _Position:
    # Lightning may have recreated the loader from its class and its arguments, without this attribute.
    kept: _Position = vars(loader).setdefault(_KEPT, _Position())
    return kept


class _Position:
    """The epoch that a loader is in, and a loaded state until the first fetch has used it."""

    def __init__(self) -> None:
        self.pending: dict[str, Any] | None = None
        self.progress: _Progress | None = None

    def __reduce__(self) -> Any:
        return _Position, ()  # a copy of a loader has no iterator

    def load(self, loader: Any, state: dict[str, Any]) -> None:
        self.pending, self.progress = state, None
        sampler = _distributed_sampler(loader)
        if sampler is not None and state.get("seed") is not None:
            sampler.seed = state["seed"]  # Lightning made the sampler with the seed of seed_everything
        _restore_generators(loader, state["generators"])

    def state(self, loader: Any) -> dict[str, Any]:
        sampler = _distributed_sampler(loader)
        return {**self._present(loader), "seed": None if sampler is None else sampler.seed, **_sizes(loader)}

    def _present(self, loader: Any) -> dict[str, Any]:
        if self.progress is not None:
            return self.progress.state(loader)
        return self.pending or _state_between_epochs(_generator_states(loader), is_alive=_is_alive(loader))

    def iterate(self, loader: Any, create: Callable[[], Iterator[Any]]) -> _Epoch:
        if self.pending is not None and self.pending["is_within"]:
            self.progress = _Progress.loaded(self.pending)
            return _Epoch(loader, self.progress, create, None)
        if self.pending is not None:
            _prepare(loader, create, self.pending)
        self.progress = _Progress.begun(loader)
        return _Epoch(loader, self.progress, create, create())


@dataclass
class _Progress:
    """The progress of an epoch, as in a loader's state. It refers to no iterator, whose workers would live on.

    Args:
        drawn: How the order was drawn: the random states before the iterator's creation and before the first fetch,
            whether the loader had workers, and whether they existed already, so that no seed was drawn for them.
        pending: The state from which the first fetch continues.
        num_fetched: Number of batches fetched since the start of the epoch.
    """

    drawn: dict[str, Any]
    pending: dict[str, Any] | None = None
    num_fetched: int = 0

    @classmethod
    def begun(cls, loader: Any) -> _Progress:
        drawn = {"created": _random_states(loader), "first": None}
        return cls({**drawn, "has_workers": loader.num_workers > 0, "is_reset": _is_alive(loader)})

    @classmethod
    def loaded(cls, state: dict[str, Any]) -> _Progress:
        drawn = {name: state[name] for name in ("created", "first", "has_workers", "is_reset")}
        return cls(drawn, state, state["num_fetched"])

    def state(self, loader: Any) -> dict[str, Any]:
        if self.pending is not None:
            return self.pending
        generators, is_alive = _generator_states(loader), _is_alive(loader)
        told = {"is_within": True, "num_fetched": self.num_fetched, "generators": generators, "is_alive": is_alive}
        return told | self.drawn


class _Epoch:
    """An iterator over the batches of an epoch, or over the rest of one.

    The rest of an epoch begins only at the first fetch: before, Lightning may create several iterators, and has not yet
    set the epoch of a distributed sampler.
    """

    def __init__(
        self, loader: Any, progress: _Progress, create: Callable[[], Iterator[Any]], batches: Iterator[Any] | None
    ) -> None:
        self._loader, self._progress, self._create, self._batches = loader, progress, create, batches
        self._has_fetched = False

    def __iter__(self) -> _Epoch:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __reduce__(self) -> Any:
        return iter, ((),)  # Lightning copies combined loaders without their iterators

    def __next__(self) -> Any:
        if not self._has_fetched:
            self._begin()
        assert self._batches is not None
        batch = next(self._batches)
        self._progress.num_fetched += 1
        return batch

    def _begin(self) -> None:
        self._has_fetched = True
        if self._progress.pending is not None:
            self._batches = _rest_of_epoch(self._loader, self._create, self._progress.pending)
            self._progress.pending = None
        if self._progress.drawn["first"] is None:
            self._progress.drawn["first"] = _random_states(self._loader)
        _kept(self._loader).pending = None


def _state_between_epochs(generators: list[torch.Tensor], is_alive: bool) -> dict[str, Any]:
    return {"is_within": False, "num_fetched": 0, "generators": generators, "is_alive": is_alive}


def _prepare(loader: Any, create: Callable[[], Iterator[Any]], state: dict[str, Any]) -> None:
    """Restore a loader's generators and persistent workers to the state from which an epoch began."""
    if state["is_alive"] and loader.persistent_workers and not _is_alive(loader):
        now = _random_states(loader)
        create()  # draws the seed of workers that the saved loader had already
        _restore(loader, now)
    _restore_generators(loader, state["generators"])


def _rest_of_epoch(loader: Any, create: Callable[[], Iterator[Any]], state: dict[str, Any]) -> Iterator[Any]:
    """Return an iterator over the remaining batches of a saved epoch. The generators do not change.

    An exception are the user's if only the present loader has workers, which draw ahead of the saved one.
    """
    now = _random_states(loader)
    try:
        if isinstance(loader.dataset, IterableDataset) or _iterates_otherwise(loader):
            return _after_fetching(loader, create, state)
        return _after_drawing(loader, state, now)
    finally:
        restore_globals(now)
        if not loader.num_workers or state["has_workers"]:
            _restore_generators(loader, now["generators"])


def _iterates_otherwise(loader: Any) -> bool:
    base = type(loader).__mro__[1]
    names = ("__iter__", "_get_iterator", "_index_sampler")
    return any(getattr(base, name) is not getattr(DataLoader, name) for name in names)


def _after_fetching(loader: Any, create: Callable[[], Iterator[Any]], state: dict[str, Any]) -> Iterator[Any]:
    if state["is_reset"] and loader.num_workers:
        create()
    _restore(loader, state["created"])
    batches = create()
    if state["first"] is not None and not state["has_workers"]:
        _restore(loader, state["first"])
    deque(itertools.islice(batches, state["num_fetched"]), maxlen=0)
    return batches


def _after_drawing(loader: Any, state: dict[str, Any], now: dict[str, Any]) -> Iterator[Any]:
    skipping = _Skipping(loader)
    again = _with_sampler(loader, skipping)
    if state["is_reset"] and loader.num_workers:
        iter(again)  # draws the seed of workers that the saved loader had already
    skipping.num_left = state["num_fetched"]
    if not state["has_workers"]:
        skipping.before = state["first"]
    elif state["is_reset"] and not loader.num_workers:
        skipping.before = state["created"]
    _restore(loader, state["created"])
    batches = iter(again)
    if loader.num_workers == 0:
        skipping.before = skipping.before or (_random_states(loader) if state["has_workers"] else None)
        skipping.after = now  # also if nothing was drawn: another loader may have drawn since this one was created
    elif loader.persistent_workers:
        loader._iterator = batches
    return batches


def _with_sampler(loader: Any, skipping: _Skipping) -> DataLoader[Any]:
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=skipping, **options)
    return DataLoader(loader.dataset, batch_sampler=skipping, **options)


class _Skipping:
    """A loader's sampler that skips, in one iteration, the draws that a saved epoch has used.

    Attributes:
        num_left: Number of draws that the next iteration skips; None to skip nothing.
        before: Random states for the skipped draws; None to continue from the present ones.
        after: Random states for the draws after them; None to continue from the present ones.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.num_left: int | None = None
        self.before: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # This is not a generator function, because the sampler may draw already when its iterator is created.
        return self._rest(iter(self._sampler))

    def _rest(self, drawn: Iterator[Any]) -> Iterator[Any]:
        if self.num_left is not None:
            self._skip(drawn)
        yield from drawn

    def _skip(self, drawn: Iterator[Any]) -> None:
        if self.before is not None:
            _restore(self._loader, self.before)
        deque(itertools.islice(drawn, self.num_left), maxlen=0)
        if self.after is not None:
            _restore(self._loader, self.after)
        self._loader = self.num_left = self.before = self.after = None


def _is_alive(loader: Any) -> bool:
    return loader.num_workers > 0 and loader.persistent_workers and loader._iterator is not None


def _samplers(loader: Any) -> tuple[Any, ...]:
    return loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)


def _distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    return next((sampler for sampler in _samplers(loader) if isinstance(sampler, DistributedSampler)), None)


def _generators(loader: Any) -> Iterable[torch.Generator]:
    """Return the generators that the user gave to the loader or its samplers, each once."""
    found = (getattr(owner, "generator", None) for owner in (loader, *_samplers(loader)))
    return {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values()


def _generator_states(loader: Any) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(loader)]


def _restore_generators(loader: Any, states: list[torch.Tensor | None]) -> None:
    for generator, state in zip(_generators(loader), states, strict=False):  # the user may have added one
        if state is not None:
            generator.set_state(state)


def _sizes(loader: Any) -> dict[str, int | None]:
    is_sized = hasattr(loader.dataset, "__len__") and not isinstance(loader.dataset, IterableDataset)
    return {"num_samples": len(loader.dataset) if is_sized else None, "batch_size": loader.batch_size}


def _random_states(loader: Any) -> dict[str, Any]:
    return global_states() | {"generators": _generator_states(loader)}


def _restore(loader: Any, states: dict[str, Any]) -> None:
    restore_globals(states)
    _restore_generators(loader, states["generators"])
