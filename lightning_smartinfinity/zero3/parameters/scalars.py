"""Lets DeepSpeed send parameters without a dimension, such as CLIP's ``logit_scale``, from rank to rank.

DeepSpeed sends a parameter as ``param.data.view(torch.uint8)``, which torch refuses for a tensor without a dimension.
Everything else in ZeRO-3 takes such a parameter as one element of shape ``[]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch.overrides import TorchFunctionMode

__all__ = ["ScalarsAsBytes", "send_gathered_scalars"]


class ScalarsAsBytes(TorchFunctionMode):
    """Within this context, ``view(torch.uint8)`` returns the bytes of a tensor without a dimension, too."""

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


@functools.cache
def send_gathered_scalars() -> None:
    """Make ``GatheredParameters(modifier_rank=...)`` send parameters without a dimension, in this process."""
    original = GatheredParameters._exit

    @functools.wraps(original)
    def _exit(self: GatheredParameters, *exc: object) -> object:
        with ScalarsAsBytes():
            return original(self, *exc)

    GatheredParameters._exit = _exit
