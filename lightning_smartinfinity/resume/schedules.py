"""Compares the learning rate schedulers of a resumed run with the saved ones, or moves them to the saved position."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_smartinfinity.settings.user_calls import user_calls

__all__ = ["prepare_loads", "warn_of_changed_schedule", "warn_of_other_number"]

_OF_PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
# Their positions, the rates before the schedule (hyperparameters of the optimizer), and what is compared elsewhere.
_NOT_COMPARED = frozenset(
    {
        *_OF_PLATEAU,
        *("T_cur", "T_i", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"),
        *("base_lrs", "lr_lambdas", "mode_worse", "verbose", "_schedulers"),
    }
)


def prepare_loads(objects: Iterable[object], *, new_settings: bool) -> None:
    """Make the next ``load_state_dict`` of torch's schedulers respect, or at least report, their present settings.

    With new settings the load takes only the number of steps, and repeats these steps. The learning rate is then that
    of a run that had the scheduler's present settings from its first step. A ``ReduceLROnPlateau`` keeps its counters,
    and the present learning rate. Without new settings the first rank warns of settings that the load changes.

    Args:
        objects: The new schedulers, whose states are loaded next; other objects do not change.
        new_settings: Whether the schedulers keep their present settings.
    """
    for scheduler in objects:
        if isinstance(scheduler, LRScheduler):
            _load_once(scheduler, _advance if new_settings else _load_and_compare)


def _load_once(scheduler: Any, load: Callable[[Any, Mapping[str, Any]], None]) -> None:
    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        del scheduler.load_state_dict  # restores the class's method
        load(scheduler, state_dict)

    scheduler.load_state_dict = load_state_dict


def _advance(scheduler: Any, state_dict: Mapping[str, Any]) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        vars(scheduler).update({name: state_dict[name] for name in _OF_PLATEAU})
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it steps before the optimizer does
        for _ in range(_steps_in(state_dict) - _steps_in(scheduler.state_dict())):
            scheduler.step()


def _load_and_compare(scheduler: Any, state_dict: Mapping[str, Any]) -> None:
    warn_of_changed_schedule(scheduler, state_dict)
    scheduler.load_state_dict(state_dict)


def warn_of_changed_schedule(scheduler: object, state_dict: Mapping[str, Any]) -> None:
    """Warn on the first rank of settings that a load will change.

    Args:
        scheduler: The new scheduler; if it is not one of torch, nothing is compared.
        state_dict: The saved state.
    """
    if not isinstance(scheduler, LRScheduler):
        return
    changes, kind = _changes(scheduler, state_dict), type(scheduler).__name__
    missing = [name for name in scheduler.state_dict() if name not in state_dict and _is_argument(scheduler, name)]
    if missing:
        _warn(
            f"The script schedules the learning rate by a {kind}, but the training that it resumes had another "
            f"scheduler, without {missing[0]}. The new one goes on from its rate and position. To train on with the "
            f"rate that the new one has there, {user_calls().changes}."
        )
    elif changes:
        _warn(user_calls().describe_kept(changes, setter=f" in its {kind}"))


def warn_of_other_number(now: int, before: int, *, new_settings: bool) -> None:
    """Warn on the first rank if the script has another number of schedulers than the training that it resumes had.

    Args:
        now: The script's number.
        before: The saved number.
        new_settings: Whether the script's learning rate is used.
    """
    if now < before and not new_settings:
        _warn(
            "The script has no learning rate scheduler, but the training that it resumes had one. The learning rate "
            f"stays as it was saved. To train on with the script's, {user_calls().changes}."
        )
    elif now > before:
        _warn(
            "The script has a learning rate scheduler, but the training that it resumes had none. The schedule begins "
            "with its first step."
        )


def _warn(message: str) -> None:
    if not (dist.is_initialized() and dist.get_rank() != 0):
        warnings.warn(message, stacklevel=5)


def _changes(scheduler: LRScheduler, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that differ, each as text of the script's own and of the saved value."""
    changes = list[tuple[str, str]]()
    for name, own in scheduler.state_dict().items():
        if name in saved and _is_setting(scheduler, name):
            before = type(own)(saved[name]) if isinstance(own, Counter) else saved[name]
            if _plain(own) != _plain(before):
                changes.append((f"{name.strip('_')}={_plain(own)}", f"{name.strip('_')}={_plain(before)}"))
    children = zip(getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    return changes + [change for child, state in children for change in _changes(child, state)]


def _is_setting(scheduler: LRScheduler, name: str) -> bool:
    """Return whether a value of a scheduler's state is a setting.

    Of a class that is not torch's, these are only the values that have the name of an argument: others may be counters.
    """
    if name in _NOT_COMPARED:
        return False
    return _is_argument(scheduler, name) or type(scheduler).__module__ == LRScheduler.__module__


def _is_argument(scheduler: LRScheduler, name: str) -> bool:
    makers = [vars(each)["__init__"] for each in type(scheduler).__mro__ if "__init__" in vars(each)]
    return name not in _NOT_COMPARED and any(name in inspect.signature(each).parameters for each in makers)


def _plain(value: object) -> object:
    """Return a value as numbers, strings, lists and dictionaries; an object of another class as its class."""
    if isinstance(value, Counter):
        return sorted(value.elements())
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if value is None or isinstance(value, str | int | float) else type(value)


def _steps_in(state_dict: Mapping[str, Any]) -> int:
    """Return the number of steps that a scheduler has taken; a ``ChainedScheduler`` itself does not count."""
    return int(state_dict["last_epoch"] if "last_epoch" in state_dict else state_dict["_schedulers"][0]["last_epoch"])
