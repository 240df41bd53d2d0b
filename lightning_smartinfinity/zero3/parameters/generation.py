"""Lets transformers generate text on several ranks under ZeRO-3, of which it does not know in Lightning and Fabric."""

from __future__ import annotations

import sys

import torch

__all__ = ["sync_generation"]

_GENERATION = "transformers.generation.utils"
_MARK = "_is_fsdp_managed_module"


def sync_generation(module: torch.nn.Module) -> None:
    """Make ``generate`` of a module that ZeRO-3 has partitioned run on each rank until all ranks are done.

    Each step gathers parameters, for which all ranks have to take it. transformers calls this ``synced_gpus``, and does
    so by itself where it knows of ZeRO-3, and for models that are marked as divided by FSDP. What a caller passes
    stays.

    Args:
        module: A module; nothing happens to one that generates no text, or that is not partitioned.
    """
    generation = sys.modules.get(_GENERATION)
    if generation is not None and isinstance(module, generation.GenerationMixin):
        vars(module).pop(_MARK, None)
        if any(hasattr(param, "ds_id") for param in module.parameters()):
            vars(module)[_MARK] = True
