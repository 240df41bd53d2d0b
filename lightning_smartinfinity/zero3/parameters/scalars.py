"""Lets DeepSpeed send parameters without a dimension, such as CLIP's ``logit_scale``, from rank to rank.

DeepSpeed sends a parameter as ``param.data.view(torch.uint8)``, which torch refuses for a tensor without a dimension.
Everything else in ZeRO-3 takes such a parameter as one element of shape ``[]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch.overrides import TorchFunctionMode

__all__ = ["ScalarsAsBytes", "send_scalars"]


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
def send_scalars() -> None:
    """Make ``zero.Init`` and ``GatheredParameters`` send parameters without a dimension, in this process."""
    for owner, name in ((Init, "_zero_init_param"), (GatheredParameters, "_exit")):
        setattr(owner, name, _with_scalars(getattr(owner, name)))


def _with_scalars(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def method(*args: object, **kwargs: object) -> object:
        with ScalarsAsBytes():
            return original(*args, **kwargs)

    return method
