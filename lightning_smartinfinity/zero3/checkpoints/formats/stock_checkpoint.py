"""Optimizer state that stock DeepSpeed saved with ZeRO-3 in memory, with or without CPU offload."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARTITION_COUNT

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.zero3.optimizer.parameter_groups import saved_numbers
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig, SavedState

__all__ = ["STEP", "WITHOUT_ARRAYS", "check_groups", "describe_stock"]

WITHOUT_ARRAYS = "without_arrays"
"""Key of a flag: the checkpoint holds no arrays other than masters."""

STEP = "step"
"""Key of the number of updates, next to an optimizer's arrays."""


def describe_stock(optimizer: StorageOptimizer, state_dict: SavedState, *, ds_config: DeepSpeedConfig) -> SavedState:
    """Return, for a checkpoint of stock DeepSpeed, the description that this strategy would have saved.

    The names and shapes of its parameters are in another file; ``check_checkpoint`` has compared them.

    Raises:
        CheckpointError: The checkpoint holds no optimizer state, or the state of another optimizer, model or number of
            processes.
    """
    layout = optimizer.partition.layout
    masters = state_dict[FP32_FLAT_GROUPS]
    numels = [master.numel() for master in masters]
    if layout.numel and not sum(numels):
        raise CheckpointError(
            "The checkpoint was saved by stock DeepSpeed with its optimizer state on NVMe: masters and moments are not "
            "in it, and stock DeepSpeed itself resumes from it without them.",
            "Resume that training in DeepSpeed without NVMe and save again, or start from its weights.",
        )
    if sum(numels) != layout.numel or state_dict[PARTITION_COUNT] != optimizer.partition_count:
        raise CheckpointError(
            f"The checkpoint holds {sum(numels)} elements per process, the model has {layout.numel}.",
            "Build the model and its parameter groups as they were when it was saved.",
        )
    _check_precision(optimizer, ds_config)
    states = [state_dict[OPTIMIZER_STATE_DICT]["state"].get(index, {}) for index in range(len(masters))]
    groups = state_dict[OPTIMIZER_STATE_DICT]["param_groups"]
    check_groups(optimizer, groups)
    if not any(states):  # saved before the first update
        return {"save_id": None, "steps": [0] * len(layout.parameters), WITHOUT_ARRAYS: True}
    _check_states(optimizer, states, numels, kept=optimizer.rule.kept_arrays(groups))
    # If no count was saved, 1 means that the arrays have been updated.
    steps = [int(state.get(STEP, 1)) for state in states]
    return {"save_id": None, "steps": _steps_of_parameters(layout, numels, steps)}


def _check_precision(optimizer: StorageOptimizer, ds_config: DeepSpeedConfig) -> None:
    # bf16 was checked before, by the names of the files.
    saved, wanted = bool(ds_config.get("fp16", {}).get("enabled")), optimizer.dtype == torch.float16
    if saved != wanted:
        raise CheckpointError(
            f"The checkpoint was saved {'in' if saved else 'without'} fp16, this run's parameters are "
            f"{optimizer.dtype}.",
            "Use the precision that it was saved with.",
        )


def _check_states(
    optimizer: StorageOptimizer, states: Sequence[SavedState], numels: Sequence[int], *, kept: Sequence[str]
) -> None:
    names = {*kept, *([STEP] if optimizer.rule.counts_updates else [])}
    for state, numel in zip(states, numels, strict=True):
        found = set(state)
        if found != names or any(state[name].numel() != numel for name in names - {STEP}):
            raise CheckpointError(
                f"The checkpoint's optimizer keeps {sorted(found)}, {optimizer.rule.name} keeps {sorted(names)}.",
                "Train with the optimizer that it was saved with.",
            )


def check_groups(optimizer: StorageOptimizer, groups: Sequence[SavedState]) -> None:
    """Check that saved parameter groups fit this optimizer.

    Raises:
        CheckpointError: The groups are of another optimizer, have unsupported settings, or differ from this
            optimizer's groups.
    """
    key = "decoupled_weight_decay"
    for saved, number in zip(groups, saved_numbers(optimizer, groups), strict=True):
        group = optimizer.optimizer.param_groups[number]
        if optimizer.rule.distinctive_setting not in saved:
            raise CheckpointError(
                f"The checkpoint's optimizer has the settings {sorted(saved)}: it is not {optimizer.rule.name}.",
                "Train with the optimizer that it was saved with.",
            )
        if saved.get("amsgrad") or not saved.get("bias_correction", True):
            raise CheckpointError(
                "The checkpoint was saved with amsgrad or without bias correction.", "Train from its weights."
            )
        if saved.get(key, group.get(key)) != group.get(key):
            raise CheckpointError(
                f"The checkpoint was saved with {key}={saved[key]}, the model is configured with {group.get(key)}.",
                "Train with the same optimizer.",
            )


def _steps_of_parameters(layout: PartitionLayout, numels: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Return each parameter's step count, which stock DeepSpeed keeps per sub-group."""
    ends = list(accumulate(numels))
    last = max(0, len(steps) - 1)
    return [steps[min(bisect_right(ends, parameter.offset), last)] if steps else 0 for parameter in layout.parameters]
