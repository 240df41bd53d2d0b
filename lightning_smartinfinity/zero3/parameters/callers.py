"""Tells user code, for which a partitioned parameter answers, from DeepSpeed's and this package's, which see it empty.

The module of the calling frame decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["building", "is_building", "is_ours", "is_vmap", "moves_module", "unanswered"]

# Modules of callers that see ZeRO-3's empty tensors, as user code does not; and modules that user code calls, so that
# the caller of their functions decides.
_OURS = ("deepspeed.", "lightning_smartinfinity.", "torch._dynamo.", "torch._subclasses.", "torch._functorch._")
_BETWEEN = (
    *("torch.", "deepspeed.runtime.zero.linear.", "copy.", "contextlib.", "functools."),
    *("lightning_smartinfinity.common.patches.", "lightning_smartinfinity.zero3.parameters.pretrained."),
    "lightning_smartinfinity.zero3.parameters.torch_functions.",
)

# Functions within Module.to, Module.cpu and their like.
_MOVING = ("<lambda>", "convert", "compute_should_use_set_data")

# Not empty while a model is built, and while all code sees the empty tensors.
_BUILDING: list[bool] = []
_UNANSWERED: list[bool] = []


@contextmanager
def building() -> Iterator[None]:
    """Leave gathered parameters as torch has them within this context, which knows what is written to them."""
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
    """Show all code the empty tensors within this context: a module's own ``state_dict`` or ``load_state_dict``, too.

    The engine saves and loads partitions beside them.
    """
    _UNANSWERED.append(True)
    try:
        yield
    finally:
        _UNANSWERED.pop()


def is_vmap(frame: Any) -> bool:
    """Return whether ``torch.vmap`` asks."""
    return bool(frame.f_globals.get("__name__") == "torch._functorch.vmap")


def moves_module(frame: Any) -> bool:
    """Return whether ``Module.to`` or its like asks: they move the empty tensor, and the partition stays."""
    return frame.f_code.co_name in _MOVING and frame.f_globals.get("__name__") == torch.nn.Module._apply.__module__


class _Callers(dict[str, bool | None]):
    """Says of each module that has used a parameter whether it is ours; None where its own caller decides."""

    def __missing__(self, module: str) -> bool | None:
        name = module + "."
        between = name.startswith(_BETWEEN) and not name.startswith(_OURS[2:])
        self[module] = decision = None if between else name.startswith(_OURS)
        return decision


_CALLERS = _Callers()


def is_ours(frame: Any) -> bool:
    """Return whether DeepSpeed, this package or a compiler runs the operation, rather than user code."""
    if _UNANSWERED:
        return True
    while frame is not None:
        decision = _CALLERS[frame.f_globals.get("__name__", "")]
        if decision is not None:
            return decision
        frame = frame.f_back
    return False
