"""ZeRO-3's partition of one rank, in the words of :mod:`lightning_smartinfinity.transfer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_smartinfinity.transfer.cuda import link_to
from lightning_smartinfinity.transfer.layout import ParameterSlice, PartitionLayout
from lightning_smartinfinity.transfer.partitions import HostPartition, Partition
from lightning_smartinfinity.transfer.staging import StagedPartition, TensorPartition
from lightning_smartinfinity.transfer.tensors import flat_of
from lightning_smartinfinity.zero3.parameters.param_swapper import stored_parameter
from lightning_smartinfinity.zero3.parameters.stored_partition import StoredPartition, has_stored_parameters

__all__ = [
    "describe_partition",
    "lies_in_host_memory",
    "make_contiguous",
    "outputs_of",
    "read_range",
    "staged_partition",
    "write_range",
    "zero_padding",
]


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


def make_contiguous(model: torch.nn.Module) -> None:
    """Lay out in order what is transposed, strided or expanded: DeepSpeed sends parameters around as plain bytes.

    A partition is contiguous in any case, and so is every parameter gathered from it.
    """
    for param in model.parameters():
        if not hasattr(param, "ds_id"):
            param.data = param.data.contiguous()


def outputs_of(optimizer: Any, *, by_cuda: bool = True) -> Partition:
    """Where updated parameters go: into host memory, to a CUDA device, or staged on their way to storage or elsewhere.

    Args:
        optimizer: DeepSpeed's, with its sub-groups made and every parameter partitioned.
        by_cuda: The storage device can copy to a CUDA device by itself.
    """
    partitions = optimizer.fp16_partitioned_groups_flat
    if lies_in_host_memory(optimizer):
        return HostPartition([flat_of(partition) for partition in partitions])
    link = None if has_stored_parameters(optimizer) or not by_cuda else link_to(partitions[0].device)
    return link.partition(partitions) if link is not None else staged_partition(optimizer)


def lies_in_host_memory(optimizer: Any) -> bool:
    """Whether all of the partition does."""
    flats = optimizer.fp16_partitioned_groups_flat
    return all(flat is not None and flat.device.type == "cpu" for flat in flats)


def staged_partition(optimizer: Any) -> StagedPartition:
    """The 16-bit (or fp32) partition, wherever it lies."""
    if has_stored_parameters(optimizer):
        return StoredPartition(optimizer)
    return TensorPartition(optimizer.fp16_partitioned_groups_flat)


def read_range(optimizer: Any, layout: PartitionLayout, begin: int, end: int) -> torch.Tensor:
    """Elements ``[begin, end)`` of the flat partition, in host memory and the parameters' dtype."""
    partition, values = staged_partition(optimizer), torch.empty(end - begin, dtype=optimizer.dtype)
    for sub_group, offset, where in _in_sub_groups(layout, begin, end):
        partition.get(sub_group, offset, values[where])
    partition.synchronize()
    return values


def write_range(optimizer: Any, layout: PartitionLayout, begin: int, values: torch.Tensor) -> None:
    """Replace elements of the flat partition from ``begin`` on, rounding masters to the parameters' dtype.

    Raises:
        StorageError: Parameters lie on storage, and writing them failed.
    """
    partition, rounded = staged_partition(optimizer), values.to(optimizer.dtype)
    for sub_group, offset, where in _in_sub_groups(layout, begin, begin + len(values)):
        partition.put(sub_group, offset, rounded[where])
    partition.synchronize()


def zero_padding(optimizer: Any, layout: PartitionLayout) -> None:
    """Zero the padding of the partition, which DeepSpeed leaves uninitialised.

    Padding is updated like everything else; starting from zero it stays zero, and two runs store the same bytes.
    """
    for piece, param in zip(layout.parameters, _flatten(optimizer.fp16_groups), strict=True):
        flat = optimizer.fp16_partitioned_groups_flat[piece.sub_group]
        if flat is not None:
            start = piece.offset - layout.sub_groups[piece.sub_group].offset
            flat.narrow(0, start + piece.real_numel, piece.numel - piece.real_numel).zero_()
        elif stored_parameter(param) is None:
            param.ds_tensor.detach()[piece.real_numel :].zero_()


def _in_sub_groups(layout: PartitionLayout, begin: int, end: int) -> Iterator[tuple[int, int, slice]]:
    """The sub-groups of a range, with the offset in each and the part of the range that lies there."""
    for sub_group in layout.sub_groups:
        first, last = max(begin, sub_group.offset), min(end, sub_group.offset + sub_group.numel)
        if first < last:
            yield sub_group.index, first - sub_group.offset, slice(first - begin, last - begin)


def _flatten(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [param for group in groups for param in group]


def _real_numel(param: Any, rank: int) -> int:
    numel = int(param.partition_numel())
    return max(0, min(numel, int(param.ds_numel) - rank * numel))
