"""Makes transformers generate text on several ranks under ZeRO-3, which it does not detect in Lightning and Fabric."""

from __future__ import annotations

import sys

import torch

__all__ = ["sync_generation"]

_GENERATION = "transformers.generation.utils"
_MARK = "_is_fsdp_managed_module"


def sync_generation(module: torch.nn.Module) -> None:
    """Make ``generate`` of a module that ZeRO-3 has partitioned run on each rank until all ranks are done.

    Each step gathers parameters, so all ranks must take it. transformers calls this ``synced_gpus``. It does so by
    itself if it knows of ZeRO-3, and for models marked as managed by FSDP. A caller's ``synced_gpus`` still wins.

    Args:
        module: A module. One that generates no text, or that is not partitioned, is not marked.
    """
    generation = sys.modules.get(_GENERATION)
    if generation is not None and isinstance(module, generation.GenerationMixin):
        vars(module).pop(_MARK, None)
        if any(hasattr(param, "ds_id") for param in module.parameters()):
            vars(module)[_MARK] = True
