"""Optimizers of torch's that are to update what ZeRO-3 has partitioned: refused, for the update would be lost."""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_smartinfinity.errors import UnsupportedError

__all__ = ["refuse_foreign_steps"]


@functools.cache
def refuse_foreign_steps() -> None:
    """Let ``step`` of every optimizer in this process raise on partitioned parameters; ours hands torch none."""
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            # What happens to be gathered loses its update as soon as it is partitioned again. The flat partitions that
            # stock DeepSpeed steps have an id, too, but no status.
            if hasattr(param, "ds_status") and not getattr(param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0):
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step() found a parameter of shape {tuple(param.ds_shape)} that ZeRO-3 "
                    "has partitioned: its module was set up by a smart_infinity strategy before.",
                    "Go on with such a strategy, or build the module anew and load a checkpoint's weights.",
                )
