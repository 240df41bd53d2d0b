"""Releases a module from engines that trained or evaluated it, whether they finished, failed or were interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.deepspeed_patches import take_off_stack
from lightning_smartinfinity.zero3.parameters.gathering import end_gathers
from lightning_smartinfinity.zero3.parameters.module_copies import is_of_deepspeed
from lightning_smartinfinity.zero3.parameters.norm_statistics import keeps_statistics
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["end_training_of", "has_engine", "release_module", "trainings_of"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Further entries that torch keeps for a hook, by the hook's id.
_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def trainings_of(module: torch.nn.Module) -> list[StorageOptimizer]:
    """Return the optimizers that train a module's parameters, or trained them last, under any strategy."""
    owners = dict.fromkeys(getattr(param, "_z3_optimizer", None) for param in module.parameters())
    return [owner for owner in owners if isinstance(owner, StorageOptimizer)]


def end_training_of(module: torch.nn.Module, *, since: str) -> None:
    """End earlier trainings of a module, under any strategy, and close their storage.

    Args:
        module: The module.
        since: Half a sentence giving the reason, for the errors of later uses.
    """
    for owner in trainings_of(module):
        owner.close_storage(since=since)
        owner.destroy()


def release_module(module: torch.nn.Module) -> None:
    """Remove earlier engines' hooks and unfinished gathers from a module, so that another engine can take it.

    Parameters stay partitioned, and the user's hooks stay. State that an earlier training of the module keeps on
    storage stays readable.
    """
    for child in module.modules():
        _remove_hooks(child)
        # An interrupted forward pass leaves this set; every read of a parameter would then gather it.
        if isinstance(child._parameters, parameter_offload.ZeROOrderedDict):
            child._parameters._in_forward = False
    take_off_stack(module.modules())
    _partition_parameters(module)


def has_engine(module: torch.nn.Module) -> bool:
    """Return whether an engine gathers the module's own parameters for its forward pass."""
    return any(_is_of_engine(hook) for hook in module._forward_pre_hooks.values())


def _is_of_engine(hook: object) -> bool:
    return is_of_deepspeed(hook) or keeps_statistics(hook)


def _remove_hooks(module: torch.nn.Module) -> None:
    for name in _HOOKS:
        hooks = getattr(module, name)
        for key in [key for key, hook in hooks.items() if _is_of_engine(hook)]:
            del hooks[key]
            for flags in _HOOK_FLAGS:
                getattr(module, flags).pop(key, None)


def _partition_parameters(module: torch.nn.Module) -> None:
    """Release parameters that an interrupted forward or backward pass left gathered; discard gradients."""
    end_gathers(module)
    for param in cast(Iterator[ZeroParameter], module.parameters()):
        param.grad = None
        if not hasattr(param, "ds_status"):
            continue
        # A broken-off forward leaves its modules in this set, and DeepSpeed releases no parameter in use.
        param.ds_active_sub_modules.clear()
        if param.ds_status == ZeroParamStatus.AVAILABLE:
            param.partition()
