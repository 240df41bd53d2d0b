"""Lets transformers generate text on several ranks under ZeRO-3, of which it does not know in Lightning and Fabric."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["sync_generation"]

_GENERATION = "transformers.generation.utils"


def sync_generation() -> None:
    """Make ``generate`` of partitioned models run on each rank until all ranks are done, in this process from now on.

    Each step gathers parameters, for which all ranks have to take it. transformers calls this ``synced_gpus``, and does
    so by itself where it knows of ZeRO-3. What a caller passes stays.
    """
    if _GENERATION in sys.modules:
        _sync(sys.modules[_GENERATION].GenerationMixin)


@functools.cache
def _sync(mixin: Any) -> None:
    original: Callable[..., Any] = mixin.generate
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments.get("synced_gpus")
        if given is None and _is_shared(self):
            kwargs["synced_gpus"] = True
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _is_shared(model: Any) -> bool:
    """Return whether the ranks have to gather the model's parameters together."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return several and any(hasattr(param, "ds_id") for param in model.parameters())
