"""ZeRO-3's partition of one rank, in the words of :mod:`lightning_smartinfinity.transfer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_smartinfinity.transfer.layout import ParameterSlice, PartitionLayout
from lightning_smartinfinity.transfer.plan import Flat, StagedPartition
from lightning_smartinfinity.transfer.staging import TensorPartition
from lightning_smartinfinity.transfer.tensors import flat_of

__all__ = ["describe_partition", "outputs_of", "zero_padding"]


def describe_partition(optimizer: Any) -> list[ParameterSlice]:
    """This rank's slice of every trainable parameter, in the order of the flat partition.

    The order is DeepSpeed's: parameter groups, sub-groups within them, parameters within those. Every slice is padded
    to the same length on every rank.
    """
    return [
        ParameterSlice(
            name=optimizer.param_names[param],
            numel=param.partition_numel(),
            real_numel=_real_numel(param, optimizer._get_param_partition_rank(param)),
            group=optimizer.sub_group_to_group_id[sub_group],
            sub_group=sub_group,
        )
        for sub_group, params in enumerate(optimizer.fp16_groups)
        for param in params
    ]


def outputs_of(partitions: Sequence[torch.Tensor]) -> Sequence[Flat] | StagedPartition:
    """Where updated parameters go: straight into host memory, or staged on their way to a device.

    Args:
        partitions: The flat tensor of each sub-group.
    """
    if all(partition.device.type == "cpu" for partition in partitions):
        return [flat_of(partition) for partition in partitions]
    return TensorPartition(partitions)


def zero_padding(layout: PartitionLayout, partitions: Sequence[torch.Tensor]) -> None:
    """Zero the padding of the partition, which DeepSpeed leaves uninitialised.

    Padding is updated like everything else; starting from zero it stays zero, and two runs store the same bytes.
    """
    for piece in layout.parameters:
        start = piece.offset - layout.sub_groups[piece.sub_group].offset
        partitions[piece.sub_group].narrow(0, start + piece.real_numel, piece.numel - piece.real_numel).zero_()


def _real_numel(param: Any, rank: int) -> int:
    numel = int(param.partition_numel())
    return max(0, min(numel, int(param.ds_numel) - rank * numel))
