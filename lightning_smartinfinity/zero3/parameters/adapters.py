"""Gathers what PEFT merges. PEFT changes weights outside of a forward pass, where ZeRO-3 has them partitioned.

On empty weights a merge does nothing, and raises no error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, is_zero_param

__all__ = ["gather_for_merges"]

_LAYERS = "peft.tuners.tuners_utils"
# PEFT's classes that combine several adapters into one.
_COMBINE = {"peft.tuners.lora.model": "LoraModel", "peft.tuners.ia3.model": "IA3Model"}


def gather_for_merges() -> None:
    """Make PEFT, if it is imported, gather each layer that it merges or unmerges, and the adapters that it combines.

    This stays until the process ends. Layers that ZeRO-3 has not partitioned are merged as before.
    """
    layers: Any = sys.modules.get(_LAYERS)
    if layers is None or layers.onload_layer.__module__ == __name__:
        return
    layers.onload_layer = _gathering(layers.onload_layer, layers.BaseTunerLayer)
    for name, of in _COMBINE.items():
        cls = getattr(sys.modules[name], of)
        cls.add_weighted_adapter = _combining(cls.add_weighted_adapter)


def _gathering(onload: Callable[..., AbstractContextManager[None]], layer_class: type) -> Callable[..., Any]:
    @contextmanager
    def onload_layer(layer: torch.nn.Module) -> Iterator[None]:
        with onload(layer), _changing(layer.parameters() if isinstance(layer, layer_class) else ()):
            yield

    return onload_layer


def _combining(combine: Callable[..., None]) -> Callable[..., None]:
    def add_weighted_adapter(model: Any, *args: object, **kwargs: object) -> None:
        with _changing(param for name, param in model.named_parameters() if model.prefix in name):
            combine(model, *args, **kwargs)

    return add_weighted_adapter


def _changing(params: Iterable[torch.nn.Parameter]) -> AbstractContextManager[object]:
    """Gather parameters, and keep what is written to them; those that the user has gathered stay so."""
    own = [p for p in params if is_zero_param(p) and not getattr(p, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0)]
    return deepspeed.zero.GatheredParameters(own, modifier_rank=0) if own else nullcontext()
