"""ZeRO-3's partition of one rank, in the terms of :mod:`lightning_smartinfinity.pipeline`, in memory or on storage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch.distributed import ProcessGroup

from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import flat_of, native_dtype
from lightning_smartinfinity.pipeline.parameters.cuda import link_to
from lightning_smartinfinity.pipeline.parameters.partitions import (
    HostPartition,
    ParameterMemory,
    StagedPartition,
    TensorPartition,
)
from lightning_smartinfinity.pipeline.state.part_transfers import PartTransfers
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, stored_parameter
from lightning_smartinfinity.zero3.untyped import ZeroOptimizer, ZeroParameter

__all__ = [
    "Partition",
    "StoredPartition",
    "describe_partition",
    "make_contiguous",
]


class StoredPartition(StagedPartition):
    """A partition whose sub-groups are in memory and on storage.

    DeepSpeed keeps a flat tensor for the sub-groups that fit into ``max_in_cpu``. In the others, each parameter is
    stored separately: on storage, or in memory if it is small. Parameters written here must not be read at the same
    time, nor have been read ahead.

    Args:
        flats: Each sub-group's flat tensor, or None if it has none.
        params: Each sub-group's parameters.
        dtype: The parameters' dtype.
        parts: Access to parts of the parameters on storage, for the thread that uses this object.
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
        """Yield parts of values: the parameter (None: the flat tensor), the offset in it, and the part."""
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


def describe_partition(optimizer: ZeroOptimizer) -> list[ParameterSlice]:
    """Return this rank's slice of every trainable parameter, in the order of the flat partition.

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
            shape=tuple(param.ds_shape),
        )
        for sub_group, params in enumerate(optimizer.fp16_groups)
        for param in params
    ]


def make_contiguous(model: torch.nn.Module) -> None:
    """Make transposed, strided or expanded parameters contiguous: DeepSpeed sends parameters as plain bytes.

    A partition is contiguous already, and so is every parameter gathered from it.
    """
    for param in model.parameters():
        if not hasattr(param, "ds_id"):
            param.data = param.data.contiguous()


class Partition:
    """This rank's slices of the parameters, wherever DeepSpeed keeps them: in memory, on a device or on storage.

    DeepSpeed keeps one flat tensor for each sub-group, unless parameters of the sub-group are on storage.

    Args:
        optimizer: DeepSpeed's optimizer, with its sub-groups created and every parameter partitioned.
        layout: The order of the slices, from :func:`describe_partition`.

    Attributes:
        layout: The order of the slices.
        group: Process group of the ranks that hold the other partitions.
        dtype: The parameters' dtype.
        index: Each parameter's index in ``layout.parameters``, by its ``ds_id``.
    """

    def __init__(self, optimizer: ZeroOptimizer, layout: PartitionLayout) -> None:
        self.layout = layout
        self.group: ProcessGroup | None = optimizer.dp_process_group
        self.dtype: torch.dtype = optimizer.dtype
        self._flats: list[torch.Tensor | None] = optimizer.fp16_partitioned_groups_flat
        self._params: list[list[ZeroParameter]] = optimizer.fp16_groups
        self.index: dict[int, int] = {param.ds_id: index for index, param in enumerate(self.params())}

    def params(self) -> Iterator[ZeroParameter]:
        """Return an iterator over the parameters, in the order of ``layout.parameters``."""
        return chain.from_iterable(self._params)

    def indices_of(self, params: Iterable[ZeroParameter]) -> set[int]:
        """Return the indices of the trained parameters among these."""
        return {self.index[param.ds_id] for param in params if param.ds_id in self.index}

    @property
    def lies_in_host_memory(self) -> bool:
        """Whether all slices are in host memory."""
        return all(flat is not None and flat.device.type == "cpu" for flat in self._flats)

    def outputs(self, *, by_cuda: bool) -> ParameterMemory:
        """Return the destination of updated parameters: host memory, a CUDA device, or a staging buffer.

        Args:
            by_cuda: Whether the storage device itself can copy to a CUDA device.
        """
        flats = self._whole_flats()
        if flats is not None and self.lies_in_host_memory:
            return HostPartition([flat_of(flat) for flat in flats])
        link = link_to(flats[0].device) if flats is not None and by_cuda else None
        return self._staged(of_update=True) if flats is None or link is None else link.partition(flats)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return elements ``[begin, end)`` of the flat partition, in host memory and the parameters' dtype."""
        staged, values = self._staged(), torch.empty(end - begin, dtype=self.dtype)
        for sub_group, offset, where in self._in_sub_groups(begin, end):
            staged.get(sub_group, offset, values[where])
        staged.synchronize()
        return values

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Replace elements of the flat partition from ``begin`` on, rounding masters to the parameters' dtype.

        Raises:
            StorageError: Parameters are on storage, and writing them failed.
        """
        staged, rounded = self._staged(), values.to(self.dtype)
        for sub_group, offset, where in self._in_sub_groups(begin, begin + len(values)):
            staged.put(sub_group, offset, rounded[where])
        staged.synchronize()

    def zero_padding(self) -> None:
        """Zero the padding, which DeepSpeed leaves uninitialised.

        Padding is updated like other elements. If it starts as zero it stays zero, so two runs store the same bytes.
        """
        for own, param in zip(self.layout.parameters, self.params(), strict=True):
            flat = self._flats[own.sub_group]
            if flat is not None:
                start = own.offset - self.layout.sub_groups[own.sub_group].offset
                flat.narrow(0, start + own.real_numel, own.numel - own.real_numel).zero_()
            elif stored_parameter(param) is None:
                param.ds_tensor.detach()[own.real_numel :].zero_()

    def release_prefetched(self) -> None:
        """Discard parameters that were read ahead: those on storage are about to change."""
        swapper = self._swapper()
        if swapper is not None:
            swapper.release_prefetched()

    def _staged(self, *, of_update: bool = False) -> StagedPartition:
        """Return access to the parameters, for an update's thread (``of_update``) or for the calling thread."""
        flats, swapper = self._whole_flats(), self._swapper()
        if flats is not None:
            return TensorPartition(flats)
        assert swapper is not None
        swapper.release_prefetched()
        parts = swapper.parts_of_update if of_update else swapper.parts
        return StoredPartition(self._flats, self._params, dtype=self.dtype, parts=parts)

    def _whole_flats(self) -> list[torch.Tensor] | None:
        """Return the flat tensors; None if a sub-group has none because its parameters are on storage."""
        flats = [flat for flat in self._flats if flat is not None]
        return flats if len(flats) == len(self._flats) else None

    def _swapper(self) -> ParameterSwapper | None:
        """Return the swapper of the parameters on storage; None if all are in memory."""
        stored = (params for params, flat in zip(self._params, self._flats, strict=True) if flat is None)
        return next((params[0].nvme_swapper for params in stored), None)

    def _in_sub_groups(self, begin: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Yield the sub-groups of a range, each with the offset in it and the part of the range that it covers."""
        for sub_group in self.layout.sub_groups:
            first, last = max(begin, sub_group.offset), min(end, sub_group.offset + sub_group.numel)
            if first < last:
                yield sub_group.index, first - sub_group.offset, slice(first - begin, last - begin)


def _real_numel(param: ZeroParameter, rank: int) -> int:
    numel = int(param.partition_numel())
    return max(0, min(numel, int(param.ds_numel) - rank * numel))
