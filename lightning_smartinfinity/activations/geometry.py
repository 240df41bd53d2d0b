"""Geometry of tensors in their storages, and autograd's counters of in-place changes.

Autograd checks the counters of saved tensors itself, but not of those that hooks packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = [
    "Geometry",
    "change_error",
    "changes_of",
    "distinct",
    "geometry_of",
    "overlaps",
    "shares_changes",
    "spread_out",
    "stored_bytes",
    "view_of",
]


class Geometry(NamedTuple):
    """Arrangement of a tensor in its storage. Strides and offset are in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return the arrangement of a tensor in its storage."""
    return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def view_of(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """Return a new tensor that views a storage."""
    tensor = torch.empty(0, dtype=geometry.dtype, device=storage.device)
    with torch.no_grad():
        return tensor.set_(storage, geometry.offset, geometry.size, geometry.stride)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor without repeated elements, at most the bytes of its storage."""
    least = distinct(tensor)
    return min(least.numel() * least.itemsize, tensor.untyped_storage().nbytes())


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that does not repeat elements along expanded dimensions."""
    size = [1 if stride == 0 else length for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(size, tensor.stride())


def overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements may share an address."""
    end = 1  # one past the farthest element of the dimensions so far
    for step, length in sorted((step, length) for length, step in zip(size, stride, strict=True) if length > 1):
        if step < end:
            return True
        end += step * (length - 1)
    return False


def spread_out(data: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return a new tensor with the given geometry, filled with the elements that :func:`distinct` returned.

    On the host, only pages that are written take up memory, however large the gaps before and between the elements are.
    On a device, the tensor takes as much memory as the storage from which it was saved, as long as backward uses it.
    """
    last = sum(step * (length - 1) for length, step in zip(geometry.size, geometry.stride, strict=True))
    nbytes = (geometry.offset + last + 1) * geometry.dtype.itemsize
    if data.device.type == "cpu":  # torch.empty would fill it if algorithms must be deterministic
        storage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    else:
        storage = torch.empty(nbytes, dtype=torch.uint8, device=data.device).untyped_storage()
    tensor = view_of(storage, geometry)
    least = distinct(tensor)
    least.copy_(data.view(geometry.dtype).view(least.shape))
    return tensor


def changes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory whose ``_version`` counts the changes of ``tensor``."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def shares_changes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share a counter of changes, as a tensor and its views do."""
    version = one._version
    if other._version != version:
        return False
    set_versions = torch._C._autograd._unsafe_set_version_counter
    try:
        set_versions((one,), (version + 1,))  # an interrupt may come right after it
        return other._version == version + 1
    finally:
        set_versions((one,), (version,))


def change_error(what: torch.Tensor | Geometry, counter: torch.Tensor, version: int) -> RuntimeError:
    """Return autograd's error for a saved tensor that was changed in place.

    Args:
        what: The tensor, or its geometry.
        counter: Tensor whose ``_version`` counts the changes.
        version: Number of changes when the tensor was saved.
    """
    dtype, size = (what.dtype, tuple(what.shape)) if isinstance(what, torch.Tensor) else (what.dtype, what.size)
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of dtype {dtype} and shape {list(size)} is at version {counter._version}; expected version "
        f"{version} instead. Hint: change a copy, or change it after backward."
    )
