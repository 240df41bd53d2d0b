"""Helpers of ``fabric.save`` and ``fabric.load``: read files, and split and fill the user's state dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_smartinfinity.errors import CheckpointError, UnsupportedError
from lightning_smartinfinity.zero3.untyped import ClientState, Pickled, SavedState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine.portable import PortableEngine

__all__ = ["move_into", "read_state_dict", "refuse_options", "refuse_optimizer", "split_state", "weights_in"]


def read_state_dict(load: Callable[..., Pickled], path: str | Path) -> SavedState:
    """Read a dictionary from a file of ``torch.save``, and verify it. Collective: a failure raises on every rank.

    Args:
        load: Function that loads the file, given its path and ``weights_only``.
        path: Path of the file.

    Raises:
        CheckpointError: The file is missing or damaged, needs ``weights_only=False``, or holds no dictionary.
    """
    from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
    from lightning_smartinfinity.zero3.checkpoints.formats.whole_file import load_verified
    from lightning_smartinfinity.zero3.ranks.collectives import raising_together

    contents: Pickled = None
    with raising_together(), reading_checkpoint(path):
        contents = load_verified(load, path)
        if not isinstance(contents, Mapping):
            raise CheckpointError(f"{path} holds no state dict.", "Pass what torch.save(module.state_dict()) wrote.")
    return contents


def weights_in(contents: ClientState, key: str, path: str | Path) -> SavedState:
    """Remove a model's weights from a file's contents and return them.

    Raises:
        CheckpointError: The contents have no weights under this key.
    """
    weights = contents.pop(key, None)
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"{path} holds no weights under {key!r}.",
            f"Pass a file of torch.save({{{key!r}: module.state_dict()}}, path), or the state with the file's key.",
        )
    return weights


def split_state(state: Mapping[str, object]) -> tuple[PortableEngine, ClientState]:
    """Return the engine in a state, and the entries other than the engine and its optimizer.

    Raises:
        UnsupportedError: The state has no model or several, or an optimizer of another model.
    """
    from lightning_smartinfinity.zero3.engine.portable import PortableEngine
    from lightning_smartinfinity.zero3.optimizer.taken_optimizer import TakenOptimizer

    engines = [value for value in state.values() if isinstance(value, PortableEngine)]
    optimizers = [value for value in state.values() if isinstance(value, TakenOptimizer)]
    if len(engines) != 1:
        raise UnsupportedError(
            f"The state has {len(engines)} models that fabric.setup returned, its keys are {list(state)}.",
            "Save and load one such model at a time: {'model': model, 'optimizer': optimizer, ...}.",
        )
    (engine,) = engines
    if any(optimizer.engine is not engine for optimizer in optimizers):
        raise UnsupportedError(
            "The state holds a model and the optimizer of another one.",
            "Pass both as the same fabric.setup returned them.",
        )
    set_up = [engine, *optimizers]
    return engine, {key: value for key, value in state.items() if not any(value is one for one in set_up)}


def move_into(state: ClientState, loaded: ClientState, *, path: str | Path, strict: bool) -> None:
    """Move loaded values into a state under the same keys; ``loaded`` keeps the values that the state lacks."""
    missing = sorted(set(state) - set(loaded))
    if strict and missing:
        raise CheckpointError(
            f"The checkpoint {path} has no {', '.join(map(repr, missing))}.", "Pass strict=False, or leave the key out."
        )
    for key in set(state) & set(loaded):
        if hasattr(state[key], "load_state_dict"):
            state[key].load_state_dict(loaded.pop(key))
        else:
            state[key] = loaded.pop(key)


def refuse_options(**options: object) -> None:
    """Refuse options of ``fabric.save`` other than None."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedError(
                f"fabric.save({name}=...) does not work with the smart_infinity strategy: DeepSpeed writes the files.",
                f"Remove {name}.",
            )


def refuse_optimizer(with_optimizer: bool) -> None:
    """Refuse an optimizer in the state when only weights are loaded."""
    if with_optimizer:
        raise UnsupportedError(
            "SmartInfinityFabricStrategy(load_full_weights=True) was given a state with an optimizer.",
            "It loads weights: leave the optimizer out, or load what fabric.save wrote, without load_full_weights.",
        )
