"""Casts and partitions models parameter by parameter, shows progress, and returns freed memory to the system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init, is_zero_param

from lightning_smartinfinity.common.freed_memory import FreedMemory
from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.zero3.ranks.collectives import show_on_rank_zero
from lightning_smartinfinity.zero3.untyped import ZeroInit, ZeroParameter

__all__ = ["cast_parameters", "having_a_parameter", "partitioning", "whole_bytes"]

_PLACEHOLDER = "smart_infinity_placeholder"
_FREED_TOGETHER = 64 << 20  # bytes


def cast_parameters(params: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Cast the floating-point parameters that ZeRO-3 has not partitioned, one by one.

    Args:
        params: The parameters.
        dtype: Their new dtype.
    """
    freed = FreedMemory(_FREED_TOGETHER)
    for param in params:
        if param.is_floating_point() and param.dtype != dtype and not is_zero_param(param):
            nbytes = param.nbytes
            param.data = param.data.to(dtype)
            freed.add(nbytes)


def whole_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of the module's parameters that ZeRO-3 has not partitioned."""
    return sum(param.nbytes for param in module.parameters() if not is_zero_param(param))


@contextmanager
def partitioning(what: str, total_bytes: int | None) -> Iterator[None]:
    """Show the progress of ``zero.Init``, on rank 0, as it partitions parameters within this context.

    Args:
        what: Description of the work, for users.
        total_bytes: Bytes of the parameters that will be partitioned; None if unknown.
    """
    freed, left = FreedMemory(_FREED_TOGETHER), total_bytes
    with ExitStack() as shown:
        advance = shown.enter_context(show_on_rank_zero(what, total_bytes))

        def zero_init_param(original: Callable[..., None], init: ZeroInit, param: ZeroParameter) -> None:
            nonlocal left
            nbytes = param.nbytes
            original(init, param)
            freed.add(nbytes)
            advance(nbytes)
            if left is not None:
                left -= nbytes
                if left == 0:
                    shown.close()  # later work in this context has its own progress bar

        with wrapped(Init, "_zero_init_param", zero_init_param), wrapped(torch.nn.Module, "apply", _apply):
            yield


def _apply(original: Callable[..., object], module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Return the module, as torch does; ``zero.Init`` returns None."""
    original(module, *args, **kwargs)
    return module


@contextmanager
def having_a_parameter(module: torch.nn.Module) -> Iterator[None]:
    """Give a module without parameters one for this context: DeepSpeed reads its dtype from the first parameter."""
    if next(module.parameters(), None) is not None:
        yield
        return
    module.register_parameter(_PLACEHOLDER, torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    try:
        yield
    finally:
        delattr(module, _PLACEHOLDER)
