"""Clips gradients in place in the arena, as torch clips them after backward."""

from __future__ import annotations

import math

import torch

from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.ranks.collectives import sum_over_ranks

__all__ = ["clip_norm", "clip_values", "norm_as_torch"]

_EPS = 1e-6  # the same as in torch.nn.utils.clip_grad_norm_


def clip_norm(optimizer: StorageOptimizer, limit: float) -> float:
    """Scale the gradients of this window so that their 2-norm over all ranks is at most ``limit``.

    Collective. Gradients that are not finite stay unchanged: the step is skipped.

    Returns:
        The norm of the unscaled gradients before clipping.
    """
    arena = optimizer.rank_state.arena
    total = sum_over_ranks(arena.sum_of_squares(), optimizer.dp_process_group)
    norm = math.sqrt(total) / float(optimizer.loss_scale) if total >= 0 else math.nan
    factor = limit / (norm + _EPS)
    if math.isfinite(norm) and factor < 1.0:
        optimizer.speculation.discard()
        arena.scale(factor)
    return norm


def clip_values(optimizer: StorageOptimizer, limit: float) -> None:
    """Clamp every element of the gradients of this window to ``[-limit, limit]``.

    Gradients that are not finite stay unchanged: the step is skipped.
    """
    arena = optimizer.rank_state.arena
    if math.isfinite(arena.sum_of_squares()):
        optimizer.speculation.discard()
        arena.clamp(limit * float(optimizer.loss_scale))


def norm_as_torch(norm: float, *, error_if_nonfinite: bool) -> torch.Tensor:
    """Return the norm as ``torch.nn.utils.clip_grad_norm_`` does, or raise its error."""
    return torch.nn.utils.get_total_norm([torch.tensor([norm])], error_if_nonfinite=error_if_nonfinite)
