"""Lets modules return anything. DeepSpeed looks for parameters in what they return, and expects certain types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_smartinfinity.zero3.untyped import ZeroOffload

__all__ = ["accept_any_output"]


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
    @functools.wraps(hook)  # its __module__ tells that it is DeepSpeed's
    def accepting(module: torch.nn.Module, inputs: Any, output: object) -> None:
        hook(module, inputs, _searchable(output))

    return accepting


def _searchable(output: object) -> object:
    """Return a list or an object with attributes that holds the parameters which the hook finds in the output."""
    if isinstance(output, (torch.Tensor, list, tuple)):  # asked first, since most are one of these
        return output
    if isinstance(output, dict):
        return list(output.values())
    return output if hasattr(output, "__dict__") else []
