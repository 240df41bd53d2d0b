"""Copies an engine's modules by ``copy.deepcopy``, as weight averages and reference models do.

The copy has its own parameters, partitioned over the same ranks, and none of ZeRO-3's hooks: an operation on one of its
parameters gathers it. Within GatheredParameters the copy has whole parameters in memory.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any, NoReturn

import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.parameters.module_guard import refuse_tracing

__all__ = [
    "copy_without_hooks",
    "is_of_deepspeed",
    "sync_generation",
]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_METHODS = ("__deepcopy__", "__reduce_ex__", "__prepare_scriptable__")
# Attributes that an engine sets on its modules.
_LEFT = ("ds_id", "ds_inflight_param_registry", "_original_parameters", "_external_params", "pre_bwd_fn", "post_bwd_fn")


def copy_without_hooks(module: torch.nn.Module) -> None:
    """Make ``copy.deepcopy`` of a module and its children leave out the engine's attributes and hooks.

    Args:
        module: The engine's module. Classes with a ``__deepcopy__`` of their own keep it.
    """
    for part in module.modules():
        if not hasattr(type(part), "__deepcopy__"):
            # copy.deepcopy looks it up on the instance.
            part.__dict__["__deepcopy__"] = partial(_deepcopy, part)
            part.__dict__["__reduce_ex__"] = partial(_reduced, part)
            part.__dict__["__prepare_scriptable__"] = partial(_refuse_script, part)


def is_of_deepspeed(hook: object) -> bool:
    """Return whether a module's hook is DeepSpeed's. The module of a function from ``exec`` is None."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def _reduced(module: torch.nn.Module, protocol: Any) -> Any:
    """Return the reduced module for ``copy.copy``, and refuse to pickle."""
    if sys._getframe(1).f_globals.get("__name__") == copy.__name__:
        reduced: Any = type(module).__reduce_ex__(module, protocol)
        if not _has_state(reduced):
            return reduced
        make, args, state = reduced[:3]
        return make, args, {name: value for name, value in state.items() if name not in _METHODS}
    raise UnsupportedError(
        f"{type(module).__name__} cannot be pickled: ZeRO-3 has partitioned its parameters.",
        "Write the model by save_pretrained(folder), a method of the strategy and of SmartInfinityTraining, or a "
        "checkpoint's by `smart-infinity export`.",
    )


def _refuse_script(module: torch.nn.Module) -> NoReturn:
    refuse_tracing(type(module).__name__)


def _has_state(reduced: Any) -> bool:
    """Return whether a reduced module has its attributes as its state; a class may define its own pickling."""
    return isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict)


def _deepcopy(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    reduced: Any = type(module).__reduce_ex__(module, 4)
    if not _has_state(reduced):
        methods = {name: vars(module).pop(name) for name in _METHODS}
        try:
            return copy.deepcopy(module, memo)
        finally:
            vars(module).update(methods)
    make, args, state = reduced[:3]
    copied: torch.nn.Module = make(*args)
    memo[id(module)] = copied
    kept = {name: value for name, value in state.items() if name not in (*_METHODS, *_LEFT)}
    for name in kept.keys() & _HOOKS:
        hooks = kept[name]
        kept[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not is_of_deepspeed(hook))
    if "_parameters" in kept:
        kept["_parameters"] = dict(kept["_parameters"])
    copied.__setstate__(copy.deepcopy(kept, memo))  # type: ignore[no-untyped-call]
    sync_generation(copied)
    return copied


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
