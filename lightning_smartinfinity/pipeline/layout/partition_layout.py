"""Cuts one rank's partition into tasklets: pure arithmetic, no I/O, no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.storage.extents import BLOCK_BYTES, CELL_NUMEL, ExtentMap, extent_bytes

__all__ = [
    "Holdings",
    "ParameterColumns",
    "ParameterSlice",
    "PartitionLayout",
    "SubGroupSlice",
    "TaskletSlice",
    "build_layout",
    "described_slices",
    "layout_over",
    "with_residents",
]


_LEAST_GRADIENT_BYTES = 2  # per element


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlice:
    """This rank's slice of one parameter.

    Args:
        name: Name in the model.
        numel: Elements of the slice in the partition, ZeRO's padding included.
        real_numel: Elements, from the first on, that belong to the parameter (0 .. ``numel``); the rest is padding.
        group: Index of the optimizer's parameter group.
        sub_group: Index of the sub-group that holds it.
        offset: First element in the flat partition; filled in by :func:`build_layout`.
        shape: Shape of the whole parameter, for comparing models.
    """

    name: str
    numel: int
    real_numel: int
    group: int
    sub_group: int
    offset: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SubGroupSlice:
    """A part of the partition that is contiguous in memory.

    Args:
        index: Number of the sub-group.
        offset: First element in the flat partition.
        numel: Number of elements.
        first: First parameter index.
        last: One past the last parameter index.
    """

    index: int
    offset: int
    numel: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskletSlice:
    """A part of the flat partition whose state is stored as one extent.

    Args:
        index: Number of the tasklet, in partition order.
        offset: First element in the flat partition.
        numel: Number of elements.
        extent_bytes: Size of the extent in bytes.
    """

    index: int
    offset: int
    numel: int
    extent_bytes: int


class ParameterColumns(NamedTuple):
    """Fields of all :class:`ParameterSlice` s as arrays, with one element for each slice.

    Args:
        offsets: int64, first element in the flat partition.
        numels: int64, number of elements, padding included.
        groups: Index of the optimizer's parameter group.
        sub_groups: Index of the sub-group.
    """

    offsets: NDArray[np.int64]
    numels: NDArray[np.int64]
    groups: NDArray[np.intp]
    sub_groups: NDArray[np.intp]


class Holdings(NamedTuple):
    """Every pair of a parameter and a tasklet that holds some of it, in partition order.

    Args:
        parameters: int64, parameter indices, ascending.
        tasklets: int64, tasklet indices, ascending.
    """

    parameters: NDArray[np.int64]
    tasklets: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PartitionLayout:
    """Positions of parameters, sub-groups and tasklets in the flat partition. Built by :func:`build_layout`.

    Args:
        parameters: Slices in partition order; their index is the parameter index everywhere.
        sub_groups: Parts that are contiguous in memory, in partition order.
        extents: Extents of the tasklets' state on storage.
        num_resident: Number of tasklets, from the first on, whose state stays in host memory.
    """

    parameters: tuple[ParameterSlice, ...]
    sub_groups: tuple[SubGroupSlice, ...]
    extents: ExtentMap
    num_resident: int = 0

    @property
    def numel(self) -> int:
        """Elements of the partition."""
        return self.extents.numel

    @cached_property
    def tasklets(self) -> tuple[TaskletSlice, ...]:
        """Tasklets in partition order."""
        return tuple(
            TaskletSlice(
                index=index,
                offset=index * self.extents.tasklet_numel,
                numel=extent.numel,
                extent_bytes=extent.nbytes,
            )
            for index, extent in enumerate(self.extents.extents)
        )

    @cached_property
    def columns(self) -> ParameterColumns:
        """The parameters as arrays, which every step reads: lists are too slow for many thousand parameters."""
        return ParameterColumns(
            offsets=np.array([parameter.offset for parameter in self.parameters], np.int64),
            numels=np.array([parameter.numel for parameter in self.parameters], np.int64),
            groups=np.array([parameter.group for parameter in self.parameters], np.intp),
            sub_groups=np.array([parameter.sub_group for parameter in self.parameters], np.intp),
        )

    @cached_property
    def holdings(self) -> Holdings:
        """All pairs of a parameter and a tasklet that holds some of it."""
        numel, (offsets, numels, *_) = self.extents.tasklet_numel, self.columns
        (held,) = np.nonzero(numels)
        firsts, lasts = offsets[held] // numel, (offsets[held] + numels[held] - 1) // numel
        counts = lasts - firsts + 1
        # Concatenate range(first, last + 1) of each parameter: one arange, shifted by a constant for each parameter.
        tasklets = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return Holdings(np.asarray(np.repeat(held, counts), np.int64), np.asarray(tasklets, np.int64))

    @cached_property
    def num_parameters_in(self) -> NDArray[np.int64]:
        """int64[num_tasklets]: number of parameters that have elements in each tasklet."""
        return np.asarray(np.bincount(self.holdings.tasklets, minlength=self.extents.num_tasklets), np.int64)

    def parameters_in(self, tasklets: Iterable[int]) -> NDArray[np.int64]:
        """Return the ascending int64 indices of the parameters that have elements in any of the tasklets."""
        wanted = np.zeros(self.extents.num_tasklets, np.bool_)
        wanted[list(tasklets)] = True
        return np.unique(self.holdings.parameters[wanted[self.holdings.tasklets]])

    def tasklets_of(self, parameters: slice) -> range:
        """Return the indices of the tasklets that hold elements of the parameters ``[start, stop)``.

        Args:
            parameters: Parameter indices with step 1; None stands for either end.
        """
        first, last, stride = parameters.indices(len(self.parameters))
        assert stride == 1, "neighbouring parameters"
        if first >= last:
            return range(0)
        begin, end = self.parameters[first].offset, self.parameters[last - 1].offset + self.parameters[last - 1].numel
        return self.tasklets_between(begin, end)

    def in_order_of_use(self, tasklets: Sequence[int], first_uses: NDArray[np.int64]) -> list[int]:
        """Sort tasklets by the first use of any of their parameters, then by index.

        Args:
            tasklets: Tasklet indices.
            first_uses: int64[num_parameters]: numbers that order the parameters by their first use.
        """
        uses = np.full(self.extents.num_tasklets, np.iinfo(np.int64).max)
        np.minimum.at(uses, self.holdings.tasklets, first_uses[self.holdings.parameters])
        wanted = np.asarray(tasklets, np.int64)
        return wanted[np.lexsort((wanted, uses[wanted]))].tolist()  # type: ignore[no-any-return]

    def tasklets_between(self, begin: int, end: int) -> range:
        """Return the indices of the tasklets that hold elements ``[begin, end)`` of the flat partition."""
        if begin >= end:
            return range(0)
        numel = self.extents.tasklet_numel
        return range(begin // numel, -(-end // numel))

    def parameters_between(self, begin: int, end: int) -> Sequence[ParameterSlice]:
        """Return the slices that hold elements ``[begin, end)`` of the flat partition, in partition order."""
        if begin >= end:
            return ()
        first = bisect_right(self._parameter_ends, begin)
        return self.parameters[first : bisect_left(self._parameter_offsets, end)]

    def real_ranges_between(self, begin: int, end: int) -> list[tuple[ParameterSlice, int, int]]:
        """Return the slices in ``[begin, end)``, each with its range of the flat partition inside, without padding."""
        ranges = [
            (parameter, max(begin, parameter.offset), min(end, parameter.offset + parameter.real_numel))
            for parameter in self.parameters_between(begin, end)
        ]
        return [(parameter, first, last) for parameter, first, last in ranges if first < last]

    def sub_group_at(self, offset: int) -> SubGroupSlice:
        """Return the sub-group that holds element ``offset`` of the flat partition."""
        return self.sub_groups[bisect_right(self._sub_group_offsets, offset) - 1]

    def least_gradient_budget(self, itemsize: int) -> int:
        """Return the smallest budget of gradients, in bytes: the tasklets of the largest parameter, and two more.

        Args:
            itemsize: Bytes of an element of a gradient.
        """
        most = max((len(self.tasklets_of(slice(i, i + 1))) for i in range(len(self.parameters))), default=0)
        window = min(self.extents.tasklet_numel, self.numel) * itemsize
        return (most + 2) * -(-window // BLOCK_BYTES) * BLOCK_BYTES

    @cached_property
    def _parameter_offsets(self) -> list[int]:
        return [parameter.offset for parameter in self.parameters]

    @cached_property
    def _parameter_ends(self) -> list[int]:
        return [parameter.offset + parameter.numel for parameter in self.parameters]

    @cached_property
    def _sub_group_offsets(self) -> list[int]:
        return [sub_group.offset for sub_group in self.sub_groups]


def build_layout(
    parameters: Iterable[ParameterSlice],
    *,
    tasklet_bytes: int,
    num_arrays: int,
    num_devices: int,
    places_per_tasklet: int,
    state_format: str = "fp32",
) -> PartitionLayout:
    """Cut a partition into tasklets.

    Args:
        parameters: Slices in partition order: one sub-group after the other, numbered from 0 without gaps. Their
            ``offset`` is ignored and computed here.
        tasklet_bytes: Largest extent in bytes.
        num_arrays: Arrays per element (Adam: 3).
        num_devices: Number of storage folders over which tasklets are spread.
        places_per_tasklet: Number of places for each tasklet's state (``TransferConfig.places_per_tasklet``).
        state_format: A name in ``STATE_FORMATS``. The fewer bytes per element, the more elements a tasklet holds.

    Returns:
        The layout. A partition without elements has no tasklets.
    """
    placed = _place(parameters)
    numel = placed[-1].offset + placed[-1].numel if placed else 0
    borders = _borders(placed, numel)
    extents = ExtentMap(
        numel=numel,
        tasklet_numel=_tasklet_numel(tasklet_bytes, num_arrays, state_format, borders),
        num_arrays=num_arrays,
        num_devices=num_devices,
        places_per_tasklet=places_per_tasklet,
        state_format=state_format,
        borders=borders,
    )
    return PartitionLayout(parameters=placed, sub_groups=_sub_groups(placed), extents=extents)


def described_slices(parameters: Iterable[Mapping[str, Any]]) -> list[ParameterSlice]:
    """Return the slices that a manifest describes; see ``StoreDescription``.

    Raises:
        KeyError, TypeError, ValueError: The manifest describes no slices.
    """
    return [
        ParameterSlice(
            name=str(parameter["name"]),
            numel=int(parameter["numel"]),
            real_numel=int(parameter["real_numel"]),
            group=int(parameter["group"]),
            sub_group=int(parameter["sub_group"]),
        )
        for parameter in parameters
    ]


def layout_over(parameters: Iterable[ParameterSlice], extents: ExtentMap) -> PartitionLayout:
    """Return the layout of slices whose tasklets are already cut.

    Raises:
        ValueError: The slices do not have as many elements as the tasklets.
    """
    placed = _place(parameters)
    if sum(parameter.numel for parameter in placed) != extents.numel:
        raise ValueError("the parameters are not those of the partition")
    return PartitionLayout(parameters=placed, sub_groups=_sub_groups(placed), extents=extents)


def with_residents(layout: PartitionLayout, *, nbytes: int, written_through: bool) -> PartitionLayout:
    """Return the layout with as many resident tasklets as fit into ``nbytes``.

    Args:
        layout: A layout without resident tasklets.
        nbytes: Bytes of host memory for resident tasklets.
        written_through: Whether resident tasklets are also on storage; if not, they use no space there.
    """
    ends = list(accumulate(extent.nbytes for extent in layout.extents.extents))
    count = bisect_right(ends, nbytes)
    extents = layout.extents if written_through else replace(layout.extents, num_in_memory=count)
    return replace(layout, extents=extents, num_resident=count)


def _place(parameters: Iterable[ParameterSlice]) -> tuple[ParameterSlice, ...]:
    placed, offset = [], 0
    for parameter in parameters:
        assert 0 <= parameter.real_numel <= parameter.numel, parameter
        placed.append(replace(parameter, offset=offset))
        offset += parameter.numel
    return tuple(placed)


def _sub_groups(parameters: Sequence[ParameterSlice]) -> tuple[SubGroupSlice, ...]:
    bounds = [0] + [i for i in range(1, len(parameters)) if parameters[i].sub_group != parameters[i - 1].sub_group]
    bounds = [*bounds, len(parameters)] if parameters else [0]
    sub_groups = []
    for index, (first, last) in enumerate(pairwise(bounds)):
        assert parameters[first].sub_group == index, "sub-groups are numbered from 0, in partition order, without gaps"
        offset = parameters[first].offset
        numel = parameters[last - 1].offset + parameters[last - 1].numel - offset
        sub_groups.append(SubGroupSlice(index=index, offset=offset, numel=numel, first=first, last=last))
    return tuple(sub_groups)


def _borders(parameters: Sequence[ParameterSlice], numel: int) -> tuple[int, ...]:
    begins = {parameter.offset for parameter in parameters if parameter.offset % CELL_NUMEL}
    return tuple(sorted(begin for begin in begins if begin < numel))


def _tasklet_numel(tasklet_bytes: int, num_arrays: int, state_format: str, borders: Sequence[int]) -> int:
    """Return a tasklet's number of elements: its extent must fit even where many small parameters add blocks."""
    form = STATE_FORMATS[state_format]
    granule = max(form.granule, BLOCK_BYTES // _LEAST_GRADIENT_BYTES)  # so that gradients are whole blocks, too
    assert granule % form.granule == 0

    def largest_extent(numel: int) -> int:
        crowd = max(Counter(border // numel for border in borders).values(), default=0) if form.has_blocks else 0
        return extent_bytes(numel, num_arrays, state_format=state_format, num_borders=crowd)

    item_bytes = sum(form.item_bytes(num_arrays))
    granules = (tasklet_bytes - BLOCK_BYTES) // (item_bytes * granule)
    # A smaller tasklet may contain fewer borders, so the size is found by iteration.
    while granules > 1 and (nbytes := largest_extent(granules * granule)) > tasklet_bytes:
        granules = max(1, min(granules - 1, granules * tasklet_bytes // nbytes))
    assert granules >= 1, f"tasklet_bytes={tasklet_bytes} holds no tasklet of {num_arrays} arrays"
    return granules * granule
