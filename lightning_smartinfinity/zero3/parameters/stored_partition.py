"""A partition of which some parameters lie on storage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from lightning_smartinfinity.pipeline.layout.tensors import native_dtype
from lightning_smartinfinity.pipeline.parameters.staging_buffer import StagedPartition
from lightning_smartinfinity.pipeline.state.part_transfers import PartTransfers
from lightning_smartinfinity.zero3.parameters.param_swapper import stored_parameter
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["StoredPartition"]


class StoredPartition(StagedPartition):
    """A partition whose sub-groups lie in memory and on storage.

    DeepSpeed keeps a flat tensor for the sub-groups that fit into ``max_in_cpu``. In the others each parameter lies by
    itself: on storage, or in memory if it is small. No parameter that is written here is being read, or read ahead.

    Args:
        flats: Each sub-group's flat tensor, or None if it has none.
        params: Each sub-group's parameters.
        dtype: The parameters' dtype.
        parts: Access to parts of the parameters on storage, which the same thread uses.
    """

    def __init__(
        self,
        flats: Sequence[torch.Tensor | None],
        params: Sequence[Sequence[ZeroParameter]],
        *,
        dtype: torch.dtype,
        parts: PartTransfers,
    ) -> None:
        self.dtype = native_dtype(dtype)
        self._flats = flats
        self._params = params
        self._starts = [_starts(of_group) for of_group in params]
        self._parts = parts

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

    def _resident(self, sub_group: int, param: ZeroParameter, begin: int, numel: int) -> torch.Tensor:
        flat = self._flats[sub_group] if param is None else param.ds_tensor
        assert flat is not None
        return flat.detach()[begin : begin + numel]

    def _split(
        self, sub_group: int, offset: int, values: torch.Tensor
    ) -> Iterator[tuple[ZeroParameter | None, int, torch.Tensor]]:
        """Yield parts of values, each with its parameter (None: the flat tensor) and the offset where it begins."""
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


def _starts(params: Sequence[ZeroParameter]) -> list[int]:
    starts, total = [], 0
    for param in params:
        starts.append(total)
        total += param.partition_numel()
    return starts
