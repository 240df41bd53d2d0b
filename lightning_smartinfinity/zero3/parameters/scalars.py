"""Allows DeepSpeed to send parameters without a dimension, such as CLIP's ``logit_scale``, between ranks.

DeepSpeed sends a parameter as ``param.data.view(torch.uint8)``, which torch refuses for a tensor without a dimension.
The rest of ZeRO-3 handles such a parameter as one element of shape ``[]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["ScalarsAsBytes", "sendable"]


class ScalarsAsBytes(TorchFunctionMode):
    """Makes ``view(torch.uint8)`` also return the bytes of a tensor without a dimension, within this context."""

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
