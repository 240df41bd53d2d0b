"""Counts of the changes in place of saved tensors, which autograd does not look for where there are hooks."""

from __future__ import annotations

import torch

from lightning_smartinfinity.activations.geometry import Geometry

__all__ = ["change_error", "changes_of", "shares_changes"]


def changes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without storage whose ``_version`` counts the changes of ``tensor``."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def shares_changes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether changes of two tensors are counted together, as those of a tensor and its views are."""
    version = one._version
    if other._version != version:
        return False
    set_versions = torch._C._autograd._unsafe_set_version_counter
    try:
        set_versions((one,), (version + 1,))  # an interrupt may come right behind it
        return other._version == version + 1
    finally:
        set_versions((one,), (version,))


def change_error(what: torch.Tensor | Geometry, counter: torch.Tensor, version: int) -> RuntimeError:
    """Return the error of autograd for a tensor that was changed.

    Args:
        what: The tensor, or how it lay in its storage.
        counter: What counts its changes.
        version: Their number when it was saved.
    """
    dtype, size = (what.dtype, tuple(what.shape)) if isinstance(what, torch.Tensor) else (what.dtype, what.size)
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of dtype {dtype} and shape {list(size)} is at version {counter._version}; expected version "
        f"{version} instead. Hint: change a copy, or change it after backward."
    )
