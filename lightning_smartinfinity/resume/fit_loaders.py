"""Saves the positions of the training loaders of a Trainer's fit, and restores them in a resumed fit.

Positions count the batches that the fit has finished, not those that were fetched:

- If the number of batches is unknown, Lightning's fetcher already holds the next batch. That batch has used random
  numbers from before the step that a position belongs to. So the loaders' states from before that batch was fetched are
  saved, and a resumed fit fetches it again. The same applies to the iterators of a fit's first epoch, which Lightning
  creates in the set-up.
- A checkpoint may be saved within a batch, which a resumed fit repeats. It holds the states from before that batch.
"""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from lightning_smartinfinity.resume.loader_position import (
    is_of_other_data,
    is_position,
    keeps_position,
    with_shared_once,
)
from lightning_smartinfinity.resume.loops import is_stateful, load_only_own_states, loaders_of
from lightning_smartinfinity.resume.random_states import capture, global_states, restore_globals

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FitLoaders"]

_SEED = "PL_GLOBAL_SEED"  # set by seed_everything; Lightning's samplers use it
_EXACT_SAMPLERS = frozenset(  # packages whose samplers hold nothing that a resumed fit does not restore
    {
        "builtins",
        "torch",
        "torchdata",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "transformers",
        "accelerate",
    }
)


class FitLoaders:
    """The training loaders of a fit.

    Args:
        trainer: Trainer whose fit is being set up and has no iterators yet.

    Attributes:
        keep_order: Whether loaders keep their own order. In fits that an earlier version began, Lightning shuffles.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._fit_loop = trainer, trainer.fit_loop
        self.keep_order = True
        self._loads_states = False
        self._at_first: dict[str, Any] | None = None
        self._before_fetch: dict[str, Any] | None = None
        self._before_last_fetch: dict[str, Any] | None = None
        self._num_begun = -1  # when the last batch was fetched
        self._random: dict[str, Any] | None = None
        load_only_own_states(trainer)
        load, epoch_loop = self._fit_loop._load_combined_loader_states, self._fit_loop.epoch_loop
        profile = type(epoch_loop)._on_before_fetch

        def note_and_load() -> None:  # Lightning's last call before it creates iterators
            if self._loads_states:
                self._fit_loop._combined_loader_states_to_load = []
            load()
            self._at_first = self._point(own=self._has_begun)

        def note_and_profile() -> None:
            self._note_fetch()
            profile(epoch_loop)

        self._fit_loop._load_combined_loader_states = note_and_load
        epoch_loop._on_before_fetch = note_and_profile

    def expect(self, saved: dict[str, Any] | None) -> None:
        """Make loaders that are set up from now on have the order and the seed of the saved fit, in all epochs.

        Args:
            saved: Result of :meth:`state` of the saved fit; None if an earlier version saved no positions.
        """
        self._loads_states = saved is not None
        self.keep_order = saved is not None and saved.get("keeps_order", _kept_order(saved["states"]))
        if saved is not None and saved["seed"] is None:
            os.environ.pop(_SEED, None)
        elif saved is not None:
            os.environ[_SEED] = saved["seed"]
        if not self.keep_order:
            self._fit_loop._combined_loader = None  # it may have been set up early, in another order

    def state(self) -> dict[str, Any]:
        """Return the loaders' state for :meth:`load`, between two batches or before the first one."""
        has_fetched_ahead = bool(getattr(self._fit_loop._data_fetcher, "batches", None))
        if has_fetched_ahead and self._before_fetch is not None:
            return self._described(self._before_fetch)
        if self._at_first is not None and (has_fetched_ahead or not self._has_begun):
            return self._described(self._at_first)
        return self._described(self._point() | {"random": None})

    def state_at_any_time(self, *, in_new_epoch: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the loaders' state for :meth:`load` and random states, within a batch from before that batch.

        Args:
            in_new_epoch: Whether the resumed fit begins with an epoch.

        Returns:
            The state, or None if the loaders are not set up; and the random states that the batch began with, or None
            outside of a batch.
        """
        if self._fit_loop._combined_loader is None:
            return None, None
        if in_new_epoch and self._has_begun:
            return self._described(self._point() | {"random": None}), None
        if self._num_begun != self._fit_loop.epoch_loop.batch_progress.total.processed:
            return self.state(), None
        assert self._before_fetch is not None
        random, before = self._before_fetch["random"], self._before_fetch
        if self._fit_loop._data_fetcher.length is None:  # the last fetch was that of the next batch
            before = self._before_last_fetch or self._at_first or before
        return self._described(before), random

    def _described(self, point: dict[str, Any]) -> dict[str, Any]:
        return {
            **point,
            "begins": point is self._at_first,
            "seed": os.environ.get(_SEED),
            "reloaded": self._fit_loop._last_train_dl_reload_epoch,
            "keeps_order": self.keep_order,
        }

    def _note_fetch(self) -> None:
        fetcher = self._fit_loop._data_fetcher
        is_ahead_of_epoch = fetcher.length is None and fetcher.fetched == 0
        is_of_batch = hasattr(fetcher, "batches") and not is_ahead_of_epoch
        self._num_begun = self._fit_loop.epoch_loop.batch_progress.total.ready if is_of_batch else -1
        self._before_last_fetch, self._before_fetch = self._before_fetch, self._point()

    def load(self, saved: dict[str, Any], *, own_only: bool) -> None:
        """Restore the loaders from a result of :meth:`state`, before random states are restored; warn of what is lost.

        Args:
            saved: The state.
            own_only: Whether to load only the states of stateful loaders, because the states of plain loaders have the
                random numbers of other processes.
        """
        combined, fetcher = self._fit_loop._combined_loader, self._fit_loop._data_fetcher
        self._random = None if own_only else saved["random"]
        self._fit_loop._last_train_dl_reload_epoch = saved["reloaded"]
        combined.reset()  # ends workers that Lightning has started for a whole epoch
        loaded = self._load_states(saved["states"], own_only=own_only)
        if saved["begins"]:
            self._at_first = {key: saved[key] for key in ("random", "states", "consumed")}
            with self._random_of_fetch():
                iter(fetcher)
            return
        fetcher.iterator = iter(combined)
        fetcher.reset()  # drops a batch that it had fetched ahead
        if len(getattr(combined._iterator, "_consumed", ())) == len(saved["consumed"]):
            combined._iterator._consumed = list(saved["consumed"])
        if self._is_over:
            self._leave_epoch(combined._iterator.iterators)
        if not own_only:
            self._warn_of_lost(loaded, saved["states"])

    def fetch_ahead(self) -> None:
        """Fetch the batch again that the saved fit had fetched ahead, if :meth:`load` resumed within an epoch."""
        fetcher = self._fit_loop._data_fetcher
        if fetcher.length is None and getattr(fetcher, "batches", None) == [] and not self._is_over:
            with self._random_of_fetch(), suppress(StopIteration):
                fetcher.batches.append(next(fetcher))
            self._num_begun = -1

    @property
    def _has_begun(self) -> bool:
        return bool(self._fit_loop.epoch_loop.batch_progress.total.ready > 0)

    @property
    def _is_over(self) -> bool:
        return bool(self._fit_loop.epoch_loop.batch_progress.is_last_batch)

    @contextmanager
    def _random_of_fetch(self) -> Iterator[None]:
        """Use the random states that the saved fit had before the fetch; restore the present ones on exit."""
        now, before, self._random = global_states(), self._random, None
        if before is not None:
            restore_globals(before)
        try:
            yield
        finally:
            if before is not None:
                restore_globals(now)

    def _point(self, *, own: bool = True) -> dict[str, Any]:
        """Return the loaders' states and the random states; with ``own``, also the states of stateful loaders."""
        loaders = loaders_of(self._fit_loop)
        has_state = [keeps_position(loader) or (own and is_stateful(loader)) for loader in loaders]
        return {
            "random": capture(self._trainer.strategy.root_device, world_size=self._trainer.world_size),
            "states": [loader.state_dict() if kept else None for loader, kept in zip(loaders, has_state, strict=True)],
            "consumed": list(getattr(self._fit_loop._combined_loader._iterator, "_consumed", ())),
        }

    def _leave_epoch(self, iterators: list[Any]) -> None:
        """Make the next iterators of stateful loaders begin an epoch.

        A loader whose ``__iter__`` is a generator function uses its loaded state only at the first fetch.
        """
        for loader, iterator in zip(loaders_of(self._fit_loop), iterators, strict=True):
            if is_stateful(loader):
                with suppress(StopIteration):
                    next(iterator)

    def _load_states(self, states: list[Any], *, own_only: bool) -> list[bool]:
        """Load the states that fit the loaders, and return for each loader whether one was loaded."""
        loaders = loaders_of(self._fit_loop)
        loaded = [False] * len(loaders)
        for number, (loader, state) in enumerate(zip(loaders, with_shared_once(loaders, states), strict=False)):
            kept = keeps_position(loader)
            if state is None or kept != is_position(state) or not (kept or is_stateful(loader)) or (own_only and kept):
                continue
            if not kept or self._is_over or not is_of_other_data(loader, state):
                loader.load_state_dict(state)
                loaded[number] = True
        return loaded

    def _warn_of_lost(self, loaded: list[bool], states: list[Any]) -> None:
        lost, loaders = [], loaders_of(self._fit_loop)
        fresh = [] if self._is_over else [one for one, done in zip(loaders, loaded, strict=True) if not done]
        if not all(map(keeps_position, fresh)):
            lost.append("a loader without state_dict and load_state_dict begins the epoch again")
        if any(map(keeps_position, fresh)):
            lost.append(
                "a DataLoader with another number of samples or another batch size begins again with its first "
                "batches, though the finished ones count, so that this epoch may repeat samples and leave out others"
            )
        if not self._is_over and any(map(_has_other_workers, loaders, states)):
            lost.append(
                "a stream that was read by workers is read without, or the reverse, so that this epoch may repeat "
                "samples and leave out others"
            )
        if any(_draws_otherwise(loader, is_over=self._is_over) for loader in loaders):
            lost.append("DataLoader workers draw their random numbers, if any, from new seeds")
        if lost and self._trainer.is_global_zero:
            warnings.warn(
                f"The resumed run is not exactly the one that was interrupted: {' and '.join(lost)}. Weights, "
                "optimizer state and schedulers are exact.",
                stacklevel=2,
            )
        samplers = sorted({name for loader in loaders for name in _own_samplers(loader)})
        if samplers and self._trainer.is_global_zero:
            warnings.warn(
                f"A resumed fit restores nothing that samplers of your own hold (here {', '.join(samplers)}), except a "
                "torch.Generator in the attribute 'generator'. The order of batches is exact if it depends only on "
                "that or on the global random numbers of torch, numpy and Python. If it depends, for example, on a "
                "generator of numpy or a count of epochs, give the DataLoader state_dict and load_state_dict methods.",
                stacklevel=2,
            )


def _kept_order(states: list[Any]) -> bool:
    """Return whether loaders kept their own order in a fit of an earlier version, given their states in its record."""
    seeds = [state.get("seed", 0) for state in states if is_position(state)]
    return bool(seeds) and all(seed is None for seed in seeds)


def _own_samplers(loader: Any) -> list[str]:
    """Return the class names of a plain DataLoader's samplers that may hold something that is not restored.

    Lightning calls ``set_epoch`` of samplers that have it, also in a resumed fit.
    """
    if not keeps_position(loader):
        return []
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    own = [type(sampler) for sampler in samplers if sampler is not None and not hasattr(sampler, "set_epoch")]
    return [kind.__qualname__ for kind in own if kind.__module__.partition(".")[0] not in _EXACT_SAMPLERS]


def _has_other_workers(loader: Any, state: Any) -> bool:
    """Return whether only one of a stream's DataLoader and the saved one has workers: they read in another order."""
    if not (keeps_position(loader) and isinstance(loader.dataset, IterableDataset) and is_position(state)):
        return False
    return bool(state["is_within"]) and state["has_workers"] != (loader.num_workers > 0)


def _draws_otherwise(loader: Any, *, is_over: bool) -> bool:
    """Return whether a loader's workers have other random numbers than those of the saved fit.

    Workers skip the samples already used instead of reading them again, except for iterable datasets. Samples that
    persistent workers have read in earlier epochs are not read again either.
    """
    if getattr(loader, "num_workers", 0) == 0:
        return False
    if not keeps_position(loader):
        return not is_over
    return loader.persistent_workers or not (is_over or isinstance(loader.dataset, IterableDataset))
