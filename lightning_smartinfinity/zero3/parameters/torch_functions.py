"""Adapts torch functions to partitioned parameters, and restores those that DeepSpeed replaces.

Other models of the process can so be traced and exported.

``zero.Init`` permanently replaces ``torch.nn.functional.linear`` by a function that keeps a layer's weight partitioned
between forward and backward. Here only an engine's own forward and backward use that function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime import engine
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3, zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch.overrides import TorchFunctionMode

from lightning_smartinfinity.common.patches import replaced

__all__ = [
    "ScalarsAsBytes",
    "autocast_of_caller",
    "linear_of_partitions",
    "putting_torch_back",
    "sendable",
]


_LINEAR = torch.nn.functional.linear


class _Linear(LinearFunctionForZeroStage3):
    """DeepSpeed's linear, which gathers the weight again in backward; its forward is torch's own, bit for bit."""

    @staticmethod
    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _LINEAR(input, weight, bias)  # DeepSpeed adds the bias separately, which rounds twice in 16 bit


# Attributes that zero.Init leaves on torch's classes: its replacements, and the originals that it saved.
_LEFT = {
    torch.nn.Module: ("__init_subclass__", "_old_init_subclass", "_old_apply"),
    torch.Tensor: ("__new__", "__old_new__"),
}


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if input.dtype is torch.float32 and weight.dtype in (torch.bfloat16, torch.float16) and is_zero_param(weight):
        input = input.to(weight.dtype)  # as autocast would, which is off here
    if not torch.compiler.is_compiling() and any(map(_is_partitioned, (input, weight, bias))):
        return _LINEAR(input, weight, bias)  # user code passed a parameter of a module that is not running
    result: torch.Tensor = _Linear.apply(input, weight, bias)
    return result


def _is_partitioned(tensor: torch.Tensor | None) -> bool:
    return is_zero_param(tensor) and tensor.ds_status is not ZeroParamStatus.AVAILABLE  # type: ignore[union-attr]


def linear_of_partitions(*, wanted: bool) -> AbstractContextManager[None]:
    """Make linear layers save no gathered weight for backward in this context, unless user code replaced ``linear``.

    Args:
        wanted: The key ``memory_efficient_linear`` of ``zero``.
    """
    if wanted and torch.nn.functional.linear in (_LINEAR, zero3_linear_wrap):  # stock DeepSpeed leaves its own there
        return replaced(torch.nn.functional, "linear", _linear)
    return nullcontext()


def autocast_of_caller() -> AbstractContextManager[None]:
    """Make an engine's forward in this context keep its caller's ``torch.autocast``, which DeepSpeed would turn off."""
    if torch.is_autocast_enabled():  # for CUDA, the same check as DeepSpeed's
        return replaced(engine, "autocast_if_enabled", lambda _: nullcontext())
    return nullcontext()


@contextmanager
def putting_torch_back() -> Iterator[None]:
    """On exit, undo the changes to torch that ``zero.Init`` made within this context, unless another one is active."""
    linear = torch.nn.functional.linear
    before = {owner: {name for name in names if name in vars(owner)} for owner, names in _LEFT.items()}
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        if not partition_parameters.zero_init_context:
            for owner, names in _LEFT.items():
                for name in names:
                    if name in vars(owner) and name not in before[owner]:
                        delattr(owner, name)
            for module_class in partition_parameters.get_all_subclasses(torch.nn.Module):
                if "_old_init" in vars(module_class):
                    del module_class._old_init


class ScalarsAsBytes(TorchFunctionMode):
    """Makes ``view(torch.uint8)`` also return the bytes of a tensor without a dimension, within this context.

    DeepSpeed sends a parameter between ranks as such a view, which torch refuses for a parameter without a dimension,
    such as CLIP's ``logit_scale``. The rest of ZeRO-3 handles it as one element of shape ``[]``.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.view and args[1:] == (torch.uint8,) and args[0].dim() == 0:  # type: ignore[attr-defined]
            args = (args[0].view(1), torch.uint8)  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


class _Sendable(torch.Tensor):
    """A tensor without a dimension whose ``view(torch.uint8)`` returns its bytes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def view(self, *shape: Any) -> torch.Tensor:
        if shape == (torch.uint8,):
            return super().view(1).view(torch.uint8)
        return super().view(*shape)


def sendable(data: torch.Tensor, frame: Any) -> torch.Tensor:
    """Return the memory of a parameter; if DeepSpeed is the caller, in a form that it can send.

    Args:
        data: The memory.
        frame: The caller's frame.
    """
    if data.dim() == 0 and str(frame.f_globals.get("__name__")).startswith("deepspeed."):
        return data.as_subclass(_Sendable)
    return data
