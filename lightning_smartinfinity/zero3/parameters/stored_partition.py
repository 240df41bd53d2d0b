"""A partition of which some parameters lie on storage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch

from lightning_smartinfinity.transfer.staging import StagedPartition
from lightning_smartinfinity.transfer.tensors import native_dtype
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, stored_parameter

__all__ = ["StoredPartition", "has_stored_parameters", "release_prefetched"]


def has_stored_parameters(optimizer: Any) -> bool:
    """Whether a sub-group of DeepSpeed's optimizer has no flat tensor."""
    return any(flat is None for flat in optimizer.fp16_partitioned_groups_flat)


def release_prefetched(optimizer: Any) -> None:
    """Forget parameters that were read ahead from storage, where there are some: they are about to change there."""
    if has_stored_parameters(optimizer):
        _swapper_of(optimizer).release_prefetched()


class StoredPartition(StagedPartition):
    """Sub-groups in memory and on storage.

    DeepSpeed keeps a flat tensor for the sub-groups that fit into ``max_in_cpu``. In the others each parameter is on
    its own: on storage, or in memory if it is small. Every parameter is partitioned while this is in use.

    Args:
        optimizer: DeepSpeed's, with its sub-groups made.
    """

    def __init__(self, optimizer: Any) -> None:
        self.dtype = native_dtype(optimizer.dtype)
        self._flats: list[torch.Tensor | None] = optimizer.fp16_partitioned_groups_flat
        self._params: list[list[Any]] = optimizer.fp16_groups
        self._starts = [_starts(params) for params in self._params]
        release_prefetched(optimizer)
        self._parts = _swapper_of(optimizer).parts

    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        for param, begin, part in self._split(sub_group, offset, values):
            stored = stored_parameter(param) if param is not None else None
            if stored is not None:
                self._parts.put(stored, begin * values.itemsize, part.view(torch.uint8))
            else:
                self._resident(sub_group, param, begin, part.numel()).copy_(part)

    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        for param, begin, part in self._split(sub_group, offset, values):
            stored = stored_parameter(param) if param is not None else None
            if stored is not None:
                self._parts.get(stored, begin * values.itemsize, part.view(torch.uint8))
            else:
                part.copy_(self._resident(sub_group, param, begin, part.numel()))

    def synchronize(self) -> None:
        self._parts.synchronize()

    def _resident(self, sub_group: int, param: Any, begin: int, numel: int) -> torch.Tensor:
        flat = self._flats[sub_group] if param is None else param.ds_tensor
        assert flat is not None
        return flat.detach()[begin : begin + numel]

    def _split(
        self, sub_group: int, offset: int, values: torch.Tensor
    ) -> Iterator[tuple[Any | None, int, torch.Tensor]]:
        """Parts of values with the parameter that each belongs to (None: the flat tensor) and where it begins there."""
        if self._flats[sub_group] is not None:
            yield None, offset, values
            return
        params, starts = self._params[sub_group], self._starts[sub_group]
        index = bisect_right(starts, offset) - 1
        while values.numel():
            begin = offset - starts[index]
            count = min(values.numel(), params[index].partition_numel() - begin)
            if count:
                yield params[index], begin, values[:count]
            offset, values, index = offset + count, values[count:], index + 1


def _swapper_of(optimizer: Any) -> ParameterSwapper:
    first = optimizer.fp16_partitioned_groups_flat.index(None)
    swapper: ParameterSwapper = optimizer.fp16_groups[first][0].nvme_swapper
    return swapper


def _starts(params: list[Any]) -> list[int]:
    starts, total = [], 0
    for param in params:
        starts.append(total)
        total += param.partition_numel()
    return starts
