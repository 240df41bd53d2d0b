"""Optimizer state in DeepSpeed's own ZeRO-3 checkpoint format.

``zero_to_fp32`` and the like read ``fp32_flat_groups`` and ``optimizer_state_dict``. What they have no word for (step
counts per parameter, names) lies beside them under ``smart_infinity``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.config import ZeroStageEnum
from numpy.typing import NDArray

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.tensors import flat_of
from lightning_smartinfinity.zero3.collectives import raising_together
from lightning_smartinfinity.zero3.partition import read_range, write_range

__all__ = ["load_state_dict", "refresh_masters", "state_dict"]

_KEY = "smart_infinity"
_VERSION = 1


def state_dict(optimizer: Any) -> dict[str, Any]:
    """This rank's optimizer state: masters and moments in host memory, one tensor per sub-group."""
    layout: PartitionLayout = optimizer.layout
    arrays = _allocate(layout, len(_state_names(optimizer)) + 1)
    optimizer.handler.read(_flats(arrays))
    steps = optimizer.handler.steps
    return {
        ZERO_STAGE: ZeroStageEnum.weights,
        LOSS_SCALER: optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        PARTITION_COUNT: optimizer.partition_count,
        OPTIMIZER_STATE_DICT: {
            "state": {
                sub_group.index: {
                    "step": torch.tensor(float(steps[sub_group.first : sub_group.last].max(initial=0))),
                    **dict(zip(_state_names(optimizer), arrays[sub_group.index][1:], strict=True)),
                }
                for sub_group in layout.sub_groups
            },
            "param_groups": _groups_with_sub_groups(optimizer),
        },
        FP32_FLAT_GROUPS: [tensors[0] for tensors in arrays],
        _KEY: {
            "version": _VERSION,
            "optimizer": optimizer.rule.name,
            "dtype": str(optimizer.dtype),
            "save_id": optimizer.save_id,
            "parameters": [(piece.name, piece.numel) for piece in layout.parameters],
            "steps": steps.tolist(),
        },
    }


def load_state_dict(optimizer: Any, state_dict: Mapping[str, Any], *, load_optimizer_states: bool) -> None:
    """Write a checkpoint's masters, and its moments and step counts if asked for, to storage and to the partition.

    Raises:
        CheckpointError: The checkpoint belongs to another model, optimizer or number of processes.
    """
    layout: PartitionLayout = optimizer.layout
    with raising_together(optimizer.dp_process_group):
        extra = _checked(optimizer, state_dict)
    optimizer.save_id = extra["save_id"]
    masters = _regrouped(layout, state_dict[FP32_FLAT_GROUPS])
    if load_optimizer_states:
        saved = state_dict[OPTIMIZER_STATE_DICT]
        states = [saved["state"][index] for index in range(len(state_dict[FP32_FLAT_GROUPS]))]
        moments = [_regrouped(layout, [state[name] for state in states]) for name in _state_names(optimizer)]
        steps = np.asarray(extra["steps"], dtype=np.int64)
        _restore_groups(optimizer, saved["param_groups"])
    else:
        moments = [[torch.zeros_like(master) for master in masters] for _ in _state_names(optimizer)]
        steps = np.zeros(len(layout.parameters), dtype=np.int64)
    optimizer.loss_scaler = state_dict[LOSS_SCALER]
    optimizer.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
    optimizer.overflow = state_dict["overflow"]
    optimizer.handler.write(_flats([list(arrays) for arrays in zip(masters, *moments, strict=True)]), steps=steps)
    for sub_group, master in zip(layout.sub_groups, masters, strict=True):
        write_range(optimizer, layout, sub_group.offset, master)


def refresh_masters(optimizer: Any) -> None:
    """Make the masters on storage equal to the partition, widened to fp32; moments and step counts stay."""
    layout: PartitionLayout = optimizer.layout
    values: dict[int, dict[str, NDArray[np.float32]]] = {}
    for index, piece in enumerate(layout.parameters):
        partition = read_range(optimizer, layout, piece.offset, piece.offset + piece.real_numel)
        values[index] = {"master": partition.to(torch.float32, copy=True).numpy()}
    optimizer.handler.modify(values)


def _state_names(optimizer: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = optimizer.rule.arrays[1:]
    return names


def _allocate(layout: PartitionLayout, num_arrays: int) -> list[list[torch.Tensor]]:
    return [
        [torch.empty(sub_group.numel, dtype=torch.float32) for _ in range(num_arrays)]
        for sub_group in layout.sub_groups
    ]


def _flats(arrays: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    return [[flat_of(tensor) for tensor in tensors] for tensors in arrays]


def _groups_with_sub_groups(optimizer: Any) -> list[dict[str, Any]]:
    groups = [{**group, "params": []} for group in optimizer.optimizer.param_groups]
    for sub_group, group in optimizer.sub_group_to_group_id.items():
        groups[group]["params"].append(sub_group)
    return groups


def _restore_groups(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _checked(optimizer: Any, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = state_dict.get(_KEY)
    if extra is None:
        raise CheckpointError(
            "The checkpoint was not saved by the smart_infinity strategy.",
            "Load its weights with load_from_checkpoint, or train from the start.",
        )
    if extra["version"] != _VERSION:
        raise CheckpointError(
            f"The checkpoint has format version {extra['version']}; this version reads {_VERSION}.",
            "Use the version of lightning-smartinfinity that saved it.",
        )
    if extra["optimizer"] != optimizer.rule.name:
        raise CheckpointError(
            f"The checkpoint was saved with {extra['optimizer']}, the model is configured with {optimizer.rule.name}.",
            "Return the same optimizer from configure_optimizers.",
        )
    if extra["dtype"] != str(optimizer.dtype):
        raise CheckpointError(
            f"The checkpoint's parameters are {extra['dtype']}, this run's are {optimizer.dtype}.",
            "Use the precision that it was saved with.",
        )
    expected = [(piece.name, piece.numel) for piece in optimizer.layout.parameters]
    saved = [tuple(item) for item in extra["parameters"]]
    if saved != expected:
        raise CheckpointError(
            f"The checkpoint's parameters differ from the model's: {_first_difference(saved, expected)}.",
            "Build the model, its parameter groups and the number of processes as they were when it was saved.",
        )
    num_groups = len(state_dict[OPTIMIZER_STATE_DICT]["param_groups"])
    if num_groups != len(optimizer.optimizer.param_groups):
        raise CheckpointError(
            f"The checkpoint has {num_groups} parameter groups, the optimizer {len(optimizer.optimizer.param_groups)}.",
            "Return the same parameter groups from configure_optimizers.",
        )
    result: Mapping[str, Any] = extra
    return result


def _first_difference(saved: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> str:
    for index, (a, b) in enumerate(zip(saved, expected, strict=False)):
        if a != b:
            return f"parameter {index} is {a[0]!r} with {a[1]} elements there and {b[0]!r} with {b[1]} here"
    return f"{len(saved)} parameters there and {len(expected)} here"


def _regrouped(layout: PartitionLayout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Saved tensors in this run's sub-groups: their cut depends on sub_group_size, the order of elements does not."""
    numels = [sub_group.numel for sub_group in layout.sub_groups]
    if [tensor.numel() for tensor in tensors] == numels:
        return [tensor.to(torch.float32).contiguous() for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors]).to(torch.float32)
    return list(torch.split(flat, numels))
