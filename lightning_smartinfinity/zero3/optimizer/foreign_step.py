"""Refuses steps of torch's optimizers on parameters that ZeRO-3 has partitioned: the update would be lost."""

from __future__ import annotations

import functools
import weakref

import torch
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.optimizer.taken_optimizer import TakenOptimizer

__all__ = ["refuse_foreign_steps"]


# Number of engines, and of the optimizer's parameters, when none of these was partitioned.
_ACCEPTED: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_num_engines = 0


def refuse_foreign_steps() -> None:
    """Make ``step`` of every optimizer in this process raise on partitioned parameters, except ours.

    Every engine calls this before it partitions parameters, as other optimizers may hold some of them.
    """
    global _num_engines
    _num_engines += 1
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    if isinstance(optimizer, TakenOptimizer):
        return
    looks = (_num_engines, sum(len(group["params"]) for group in optimizer.param_groups))
    if _ACCEPTED.get(optimizer) != looks:
        _refuse_partitioned(optimizer)
        if not any(hasattr(param, "ds_status") for group in optimizer.param_groups for param in group["params"]):
            _ACCEPTED[optimizer] = looks


def _refuse_partitioned(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            # A parameter that happens to be gathered loses its update when it is partitioned again. The flat partitions
            # that stock DeepSpeed steps have an id, but no status.
            if hasattr(param, "ds_status") and not getattr(param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0):
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step() found a parameter of shape {tuple(param.ds_shape)} that ZeRO-3 "
                    "has partitioned: its module was set up by a smart_infinity strategy before, or is a copy of one "
                    "that was.",
                    "Go on with such a strategy, or build the module anew and load a checkpoint's weights.",
                )
