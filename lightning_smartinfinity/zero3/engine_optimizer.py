"""Presents the optimizer of a training engine as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.untyped import ParamGroup

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine import SmartInfinityEngine

__all__ = ["EngineOptimizer"]


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer that Fabric returns to its user in place of the one that was set up.

    DeepSpeed's own is no ``torch.optim.Optimizer``, which torch's schedulers require. Fabric also derives its wrapper
    from the class of what it wraps: DeepSpeed's methods would then set the optimizer's attributes on the wrapper.

    Args:
        engine: The training engine. Its parameter groups are those of the user's optimizer, changed in place.
    """

    def __init__(self, engine: SmartInfinityEngine) -> None:
        original = engine.optimizer.optimizer
        super().__init__(original.param_groups, original.defaults)
        self.engine = engine

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return bool(self.engine.optimizer.overflow)

    @property
    def loss_scale(self) -> float:
        """Factor by which ``backward`` multiplies the loss; 1 except in fp16."""
        return float(self.engine.optimizer.loss_scale)

    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from the gradients of every backward since the last step or ``zero_grad``."""
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) does not work with the smart_infinity strategy.",
                "Run forward and backward first, then call optimizer.step().",
            )
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        self.engine.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> NoReturn:
        """Raise UnsupportedError: the state lies on storage, and no rank has all of it."""
        raise UnsupportedError(
            "optimizer.state_dict() does not work with the smart_infinity strategy: the state is on storage.",
            "Save it by fabric.save(path, {'model': model, 'optimizer': optimizer}).",
        )

    def load_state_dict(self, state_dict: ParamGroup) -> NoReturn:
        """Raise UnsupportedError, as :meth:`state_dict` does."""
        raise UnsupportedError(
            "optimizer.load_state_dict() does not work with the smart_infinity strategy: the state is on storage.",
            "Load it by fabric.load(path, {'model': model, 'optimizer': optimizer}).",
        )

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Raise UnsupportedError after set-up: the layout of the state on storage is fixed."""
        if not hasattr(self, "engine"):  # torch's constructor adds the user's groups
            super().add_param_group(param_group)
            return
        raise UnsupportedError(
            "add_param_group does not work in mid-training with the smart_infinity strategy.",
            "Give the optimizer every parameter group before fabric.setup.",
        )
