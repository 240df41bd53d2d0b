"""Moves new learning rate schedulers to the position of saved ones, where a resumed run has new hyperparameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["advance_when_loaded"]

_OF_PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def advance_when_loaded(objects: Iterable[object]) -> None:
    """Make the next ``load_state_dict`` of torch's schedulers take only the number of steps, and repeat these steps.

    The learning rate is then that of a run that had the scheduler's present settings from its first step. A
    ``ReduceLROnPlateau`` keeps its counters, and the present learning rate.

    Args:
        objects: The new schedulers; other objects do not change.
    """
    for scheduler in objects:
        if isinstance(scheduler, LRScheduler):
            _advance_once(scheduler)


def _advance_once(scheduler: Any) -> None:
    def load(state_dict: Mapping[str, Any]) -> None:
        del scheduler.load_state_dict  # restores the class's method
        if isinstance(scheduler, ReduceLROnPlateau):
            vars(scheduler).update({name: state_dict[name] for name in _OF_PLATEAU})
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it steps before the optimizer does
            for _ in range(_steps_in(state_dict) - _steps_in(scheduler.state_dict())):
                scheduler.step()

    scheduler.load_state_dict = load


def _steps_in(state_dict: Mapping[str, Any]) -> int:
    """Return the number of steps that a scheduler has taken; a ``ChainedScheduler`` itself does not count."""
    return int(state_dict["last_epoch"] if "last_epoch" in state_dict else state_dict["_schedulers"][0]["last_epoch"])
