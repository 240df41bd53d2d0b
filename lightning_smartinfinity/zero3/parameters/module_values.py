"""Allows modules to take parameters as inputs, and to return values of any type.

DeepSpeed's hooks process the inputs and outputs of each module: they pass on the empty tensors of partitioned
parameters, and search outputs of certain types only for parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_smartinfinity.zero3.parameters.partitioned_parameter import PartitionedParameter, torch_computes
from lightning_smartinfinity.zero3.parameters.partitioned_tensor import PartitionedTensor
from lightning_smartinfinity.zero3.parameters.status import is_engine_at_work
from lightning_smartinfinity.zero3.parameters.unrounded import is_fp32_in_memory, is_rounded
from lightning_smartinfinity.zero3.untyped import ZeroOffload, ZeroParameter

__all__ = ["accept_any_output", "answer_values"]


def accept_any_output(offload: ZeroOffload) -> None:
    """Make DeepSpeed's forward hooks accept every output: numbers, text, arrays, dictionaries with any keys.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``, whose hooks are on the modules.
    """
    searching = {handle.id for handle in offload.forward_hooks}
    for module in offload.module.modules():
        hooks = module._forward_hooks
        for number in [number for number in hooks if number in searching]:
            hooks[number] = _accepting(hooks[number])


def _accepting(hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(hook)  # keeps DeepSpeed's __module__, by which release.py finds the hook
    def accepting(module: torch.nn.Module, inputs: Any, output: object) -> None:
        hook(module, inputs, _searchable(output))

    return accepting


def _searchable(output: object) -> object:
    """Return the output in a form that the hook can search: a tensor, list, tuple, or object with attributes."""
    if isinstance(output, (torch.Tensor, list, tuple)):  # the common case, so it is checked first
        return output
    if isinstance(output, dict):
        return list(output.values())
    return output if hasattr(output, "__dict__") else []


def answer_values(module: torch.nn.Module) -> None:
    """Replace partitioned parameters that a module or its children take or return by tensors that stand for them.

    Args:
        module: The engine's module, which has DeepSpeed's hooks.
    """
    for child in module.modules():
        for name, kind in (("post_bwd_fn", _OfInputs), ("pre_bwd_fn", _OfValues)):
            hook = child.__dict__.get(name)
            if hook is not None and not isinstance(hook, _OfValues):
                own = next((param for param in child._parameters.values() if param is not None), None)
                child.__dict__[name] = kind(hook, own)


class _OfValues:
    """DeepSpeed's function that adds a backward hook to each tensor that a module returns.

    Args:
        original: DeepSpeed's function.
        param: A parameter of the module, if it has one.
    """

    def __init__(self, original: Any, param: ZeroParameter | None) -> None:
        self._original, self._param = original, param

    def apply(self, value: torch.Tensor) -> Any:
        """Return the tensor with the hook."""
        is_other = type(value) is not torch.Tensor  # checked first for speed: most values are ordinary tensors
        if is_other and isinstance(value, PartitionedParameter) and not torch_computes(value):
            value = PartitionedTensor.of(value)
        return self._original.apply(value)


class _OfInputs(_OfValues):
    """DeepSpeed's function that adds a backward hook to each tensor that a module is passed."""

    def apply(self, value: torch.Tensor) -> Any:
        """Return the tensor with the hook, cast to the module's dtype if user code passed it in fp32."""
        if value.dtype is torch.float32 and not is_engine_at_work() and self._takes_16_bit():
            # User code in a hook expects an fp32 module, as in memory. The engine casts its own inputs earlier.
            value = value.to(self._param.dtype)  # type: ignore[union-attr]
        return super().apply(value)

    def _takes_16_bit(self) -> bool:
        return self._param is not None and is_fp32_in_memory(self._param) and is_rounded(self._param.dtype)
