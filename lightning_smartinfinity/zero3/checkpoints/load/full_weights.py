"""Loads the whole weights of a one-file checkpoint into a partitioned model, and unrounded into masters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import deepspeed
import torch

from lightning_smartinfinity.common.progress import Advance
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.optimizer.outside_writes import OutsideWrites
from lightning_smartinfinity.zero3.ranks.collectives import raising_together, show_on_rank_zero
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["full_state_dict", "load_full_weights"]

_MAX_NAMED = 5


def full_state_dict(checkpoint: object, path: object) -> SavedState:
    """Return the weights in a one-file checkpoint.

    Raises:
        CheckpointError: The checkpoint has no weights.
    """
    weights = checkpoint.get("state_dict") if isinstance(checkpoint, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{path} holds no 'state_dict'.", "Pass a checkpoint that Lightning saved as one file.")
    return weights


def load_full_weights(
    module: torch.nn.Module, weights: SavedState, *, writes: OutsideWrites | None, strict: bool
) -> None:
    """Load a full state dict into a partitioned model, and into the masters of a training. Collective.

    Args:
        module: Module that DeepSpeed's engine wraps.
        weights: Weights by name, the same on all ranks. Masters get them without rounding to the parameters' dtype.
        writes: The optimizer's outside writes; None if the module is not being trained.
        strict: Whether all keys must match.

    Raises:
        CheckpointError: A shape differs or, if ``strict``, keys do. Weights that fit have been loaded by then.
    """
    found = _Misfits()
    numels = {name: int(getattr(param, "ds_numel", param.numel())) for name, param in module.named_parameters()}
    tensors = {
        name: value
        for name, value in weights.items()
        if isinstance(value, torch.Tensor) and value.numel() == numels.get(name)
    }
    nbytes = sum(value.nbytes for value in weights.values() if isinstance(value, torch.Tensor))
    with (
        show_on_rank_zero("Loading the weights", nbytes) as advance,
        writes.precisely(tensors) if writes is not None else nullcontext(),
    ):
        _load(module, dict(weights), "", getattr(weights, "_metadata", {}), found, advance)
    with raising_together():
        found.require_none(strict=strict)


@dataclass
class _Misfits:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def require_none(self, *, strict: bool) -> None:
        problems = list(self.errors)
        if strict and self.missing:
            problems.append(f"missing: {_listed(self.missing)}")
        if strict and self.unexpected:
            problems.append(f"not in the model: {_listed(self.unexpected)}")
        if problems:
            raise CheckpointError(
                f"The weights do not fit the model: {'; '.join(problems)}.",
                "Load weights of the same model, or set strict_loading=False where keys may differ.",
            )


def _load(
    module: torch.nn.Module,
    weights: dict[str, object],
    prefix: str,
    metadata: SavedState,
    found: _Misfits,
    advance: Advance,
) -> None:
    """Load recursively like ``Module.load_state_dict``, gathering each module's own parameters while it loads."""
    with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
        # Every rank loads, because buffers are not broadcast.
        module._load_from_state_dict(
            weights, prefix, metadata.get(prefix[:-1], {}), True, found.missing, found.unexpected, found.errors
        )
    below = {f"{prefix}{name}." for name, child in module._modules.items() if child is not None}
    advance(_bytes_outside(weights, below))
    for name, child in module._modules.items():
        if child is not None:
            start = f"{prefix}{name}."
            inside = {key: value for key, value in weights.items() if key.startswith(start)}
            _load(child, inside, start, metadata, found, advance)


def _bytes_outside(weights: Mapping[str, object], prefixes: Collection[str]) -> int:
    """Return the bytes of the tensors whose names begin with none of the prefixes."""
    outside = (value for key, value in weights.items() if not key.startswith(tuple(prefixes)))
    return sum(value.nbytes for value in outside if isinstance(value, torch.Tensor))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(repr, names[:_MAX_NAMED])) + more
