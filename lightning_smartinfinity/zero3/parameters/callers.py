"""Distinguishes user code, which sees whole parameters, from DeepSpeed and this package, which see the empty tensors.

The module of the calling frame decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["building", "is_building", "is_ours", "is_vmap", "moves_module", "unanswered"]

# Modules whose code sees ZeRO-3's empty tensors; and library modules for which their own caller decides.
_OURS = ("deepspeed.", "lightning_smartinfinity.", "torch._dynamo.", "torch._subclasses.", "torch._functorch._")
_BETWEEN = (
    *("torch.", "deepspeed.runtime.zero.linear.", "copy.", "contextlib.", "functools."),
    *("lightning_smartinfinity.common.patches.", "lightning_smartinfinity.zero3.parameters.pretrained."),
    "lightning_smartinfinity.zero3.parameters.torch_functions.",
)

# Functions within Module.to, Module.cpu and similar methods.
_MOVING = ("<lambda>", "convert", "compute_should_use_set_data")

# Not empty while a model is being built.
_BUILDING: list[bool] = []
_UNANSWERED: list[bool] = []


@contextmanager
def building() -> Iterator[None]:
    """Give gathered parameters torch's own ``data`` and ``set_`` within this context, which tracks writes itself."""
    _BUILDING.append(True)
    try:
        yield
    finally:
        _BUILDING.pop()


def is_building() -> bool:
    """Return whether a model is being built."""
    return bool(_BUILDING)


@contextmanager
def unanswered() -> Iterator[None]:
    """Show all code the empty tensors within this context, even a module's own ``state_dict`` or ``load_state_dict``.

    The engine saves and loads the partitions separately.
    """
    _UNANSWERED.append(True)
    try:
        yield
    finally:
        _UNANSWERED.pop()


def is_vmap(frame: Any) -> bool:
    """Return whether the frame is ``torch.vmap``'s."""
    return bool(frame.f_globals.get("__name__") == "torch._functorch.vmap")


def moves_module(frame: Any) -> bool:
    """Return whether the frame is of ``Module.to`` or a similar method, which moves the empty tensor only."""
    return frame.f_code.co_name in _MOVING and frame.f_globals.get("__name__") == torch.nn.Module._apply.__module__


class _Callers(dict[str, bool | None]):
    """A cache: for each module that used a parameter, whether it sees empty tensors; None if its caller decides."""

    def __missing__(self, module: str) -> bool | None:
        name = module + "."
        between = name.startswith(_BETWEEN) and not name.startswith(_OURS[2:])
        self[module] = decision = None if between else name.startswith(_OURS)
        return decision


_CALLERS = _Callers()


def is_ours(frame: Any) -> bool:
    """Return whether DeepSpeed, this package or a compiler runs the operation, not user code."""
    if _UNANSWERED:
        return True
    while frame is not None:
        decision = _CALLERS[frame.f_globals.get("__name__", "")]
        if decision is not None:
            return decision
        frame = frame.f_back
    return False
