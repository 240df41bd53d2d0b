"""Gradients that a step has used up, and that training in memory would hold until ``zero_grad``."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from lightning_smartinfinity.pipeline.gradients.arena import GradientArena

__all__ = ["UsedGradients"]


class UsedGradients:
    """Which parameters torch would still hold a gradient of, although the arena holds none.

    Args:
        num_parameters: Number of parameters in the partition.

    Attributes:
        expects_reset: Whether the caller's loop resets gradients, as it does for training in memory.
    """

    def __init__(self, num_parameters: int) -> None:
        # Each bool[num_parameters]: whether torch would hold a gradient, whether it would hold it as zeros, and whether
        # a step has used the gradient and nothing has reset it since.
        self._held, self._zeros, self._used = np.zeros((3, num_parameters), np.bool_)
        self.expects_reset = False
        self._has_warned = False

    def warn_of_missing_reset(self) -> None:
        """Warn once if a step comes before the gradients of the step before were reset."""
        if self.expects_reset and not self._has_warned and self._used.any():
            self._has_warned = True
            warnings.warn(
                "A step came without zero_grad() since the step before. In memory it would use the gradients of that "
                "step, too; with the smart_infinity strategy a step uses its gradients up, and each begins with none. "
                "Call optimizer.zero_grad() after each step. To add gradients up, call step() after the last backward.",
                stacklevel=3,
            )

    def add_zeros_to(self, arena: GradientArena) -> None:
        """Make parameters active whose gradient torch would hold as zeros, since no other gradient has arrived."""
        for index in np.flatnonzero(self._zeros & ~arena.active).tolist():
            arena.replace(index, torch.empty(0))

    def use(self, arena: GradientArena) -> None:
        """Record that a step uses the arena's gradients up."""
        self._held |= arena.active
        self._used |= arena.active

    def reset_all(self, arena: GradientArena, *, to_none: bool) -> None:
        """Record that user code resets all gradients.

        Args:
            arena: The gradients of this window, about to be discarded.
            to_none: Whether torch would hold none afterwards; if not, it would hold zeros where it held a gradient.
        """
        self._held = (self._held | arena.active) & (not to_none)
        self._zeros = self._held.copy()
        self._used[:] = False

    def reset(self, index: int) -> None:
        """Record that user code has read or discarded one used gradient, as ``Module.zero_grad`` does."""
        self._used[index] = False

    def holds(self, index: int) -> bool:
        """Return whether torch would hold a gradient of a parameter."""
        return bool(self._held[index])
