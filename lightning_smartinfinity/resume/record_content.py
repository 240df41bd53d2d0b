"""The content of a training record: the engine's part and the loop's part, as a resume reads them."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.errors import StorageCorruptError
from lightning_smartinfinity.resume.random_states import RNG_KEY
from lightning_smartinfinity.resume.typed_json import decode, encode
from lightning_smartinfinity.settings.user_calls import (
    CALLS_OF_FABRIC,
    CALLS_OF_TRAINER,
    CALLS_OF_TRANSFORMERS,
    UserCalls,
)

if TYPE_CHECKING:
    from lightning_smartinfinity.storage.records.training_record import TrainingRecord
    from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

__all__ = ["TRAINER_KEYS", "TRANSFORMERS_KEYS", "calls_of", "content_of", "read_content"]

_ENGINE, _LOOP = "engine", "loop"
_FIRST_WITH_LOADERS = 4  # only some records of version 3 have them
_ENGINE_KEYS = frozenset({"counters", "groups", "loss_scaler", "dynamic_loss_scale", "overflow", "buffers", "frozen"})

_OF_TRAINER, _OF_TRANSFORMERS = "after_batch", "trainer_state"  # each is in records of one kind only
TRAINER_KEYS = frozenset({_OF_TRAINER, "loaders", "checkpoint", "metrics", RNG_KEY})
"""Keys of the loop's part in a record of Lightning's Trainer."""
TRANSFORMERS_KEYS = frozenset(
    {
        *(_OF_TRANSFORMERS, "callbacks", "control", "running", "tr_loss", "scheduler"),
        *("batches", "epoch", "fraction", "pending"),
    }
)
"""Keys of the loop's part in a record of transformers' Trainer."""


def content_of(engine: SavedState, loop: ClientState) -> bytes:
    """Return the content of a record.

    Args:
        engine: The engine's part.
        loop: The loop's part.

    Raises:
        UnwritableError: A value is of a type that a record cannot hold.
    """
    return encode({_ENGINE: engine, _LOOP: loop})


def read_content(record: TrainingRecord, *, loop_keys: Collection[str] = ()) -> tuple[SavedState, ClientState]:
    """Return the engine's and the loop's part of a record of any version that is read.

    Args:
        record: The record.
        loop_keys: Keys that the loop's part needs, besides those of its kind of Trainer, which its content shows.

    Raises:
        StorageCorruptError: The content is not what this package writes.
    """
    try:
        saved: Any = decode(record.content)
        engine, loop = saved[_ENGINE], saved[_LOOP]
        if record.version < _FIRST_WITH_LOADERS and _OF_TRAINER in loop and "loaders" not in loop:
            loop = {**loop, "loaders": _loaders_in(loop)}
        missing = sorted({*_ENGINE_KEYS - engine.keys(), *{*loop_keys, *_keys_of_kind(loop)} - loop.keys()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_ours(record, str(error)) from error
    if missing:
        raise _not_ours(record, f"it has no {missing[0]!r}")
    return engine, loop


def calls_of(record: TrainingRecord) -> UserCalls | None:
    """Return the calls of the entry point whose training wrote a record; None if its content cannot be read."""
    try:
        _, loop = read_content(record)
    except StorageCorruptError:
        return None
    kinds = {_OF_TRAINER: CALLS_OF_TRAINER, _OF_TRANSFORMERS: CALLS_OF_TRANSFORMERS}
    return next((calls for key, calls in kinds.items() if key in loop), CALLS_OF_FABRIC)


def _keys_of_kind(loop: ClientState) -> Collection[str]:
    kinds = {_OF_TRAINER: TRAINER_KEYS, _OF_TRANSFORMERS: TRANSFORMERS_KEYS}
    return next((keys for key, keys in kinds.items() if key in loop), frozenset())


def _loaders_in(loop: ClientState) -> ClientState:
    """Return the state of the loaders, as ``FitLoaders.state`` does, from a Trainer's record that has none.

    Versions before 26 November 2026 left positions of loaders in the state of Lightning's fit loop.
    """
    fit_loop = loop["checkpoint"]["loops"]["fit_loop"]["state_dict"]
    return {
        "random": None,
        "states": list(fit_loop.get("combined_loader", ())),
        "consumed": [],
        "begins": not loop["after_batch"],
        "seed": os.environ.get("PL_GLOBAL_SEED"),
        "reloaded": loop["checkpoint"]["epoch"],
    }


def _not_ours(record: TrainingRecord, reason: str) -> StorageCorruptError:
    return StorageCorruptError(
        f"The training record of step {record.step} is not what this package writes: {reason}.",
        "Resume from a checkpoint.",
    )
