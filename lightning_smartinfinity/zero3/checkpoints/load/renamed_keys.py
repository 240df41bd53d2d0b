"""Matches a module's parameters with saved ones whose names the module's own hooks change."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["saved_names"]


def saved_names(module: torch.nn.Module, names: Collection[str], saved: SavedState, path: Path) -> dict[str, str]:
    """Return the name of the saved parameter from which each parameter of a module takes its values.

    If names differ, the module's pre-hooks of ``load_state_dict`` are called with empty tensors instead of values.

    Args:
        module: Module whose parameters are to be loaded.
        names: Names of the saved parameters.
        saved: The saved state dict, which also holds entries that are not parameters.
        path: Path of the checkpoint, for errors.

    Returns:
        The name in the checkpoint for each name in the module that has one.

    Raises:
        CheckpointError: A hook computes new values instead of renaming.
    """
    here = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if here <= set(names):
        return {name: name for name in here}
    markers = {name: torch.empty(0) for name in names}
    found: dict[str, object] = {}
    _call_hooks(module, {**saved, **markers}, "", getattr(saved, "_metadata", {}), found)
    by_marker = {id(marker): name for name, marker in markers.items()}
    origins = {name: by_marker.get(id(value), name) for name, value in found.items()}
    computed = sorted(name for name, origin in origins.items() if origin not in markers)
    if computed:
        raise CheckpointError(
            f"A hook of {type(module).__name__} computes {computed[0]!r} of what {path} holds, which is not in memory "
            "while it is loaded.",
            "Make one file of the checkpoint with convert_zero_checkpoint_to_fp32_state_dict, and load that with "
            "load_full_weights=True.",
        )
    return origins


def _call_hooks(
    module: torch.nn.Module, state: dict[str, object], prefix: str, metadata: SavedState, found: dict[str, object]
) -> None:
    """Call the hooks of a module and its children in the order of ``Module.load_state_dict``."""
    for hook in module._load_state_dict_pre_hooks.values():
        hook(state, prefix, metadata.get(prefix[:-1], {}), True, [], [], [])
    for name, param in module._parameters.items():
        if param is not None and prefix + name in state:
            found[prefix + name] = state[prefix + name]
    for name, child in module._modules.items():
        if child is not None:
            start = f"{prefix}{name}."
            below = {key: value for key, value in state.items() if key.startswith(start)}
            _call_hooks(child, below, start, metadata, found)
