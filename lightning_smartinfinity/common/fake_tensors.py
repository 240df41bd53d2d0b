"""Tensors without memory."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["fake_tensors"]


def fake_tensors() -> FakeTensorMode:
    """Return a context in which new and loaded tensors have shape and dtype but no memory.

    It does not use the cache that all of torch's modes share: each load of a file would add entries that stay there.
    """
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode
