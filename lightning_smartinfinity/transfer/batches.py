"""Batches for a storage device, from a layout and from where things lie in memory: arithmetic only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.store.spread import Placement
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.tensors import Flat

__all__ = [
    "Compression",
    "DTYPE_BYTES",
    "FlatMemory",
    "Memory",
    "Piece",
    "Places",
    "Span",
    "cut",
    "pieces_within",
    "segments_of",
    "spans_of",
    "tasklets_in",
    "whole_sub_groups",
]

DTYPE_BYTES = {native.DType.FLOAT32: 4, native.DType.FLOAT16: 2, native.DType.BFLOAT16: 2}


class Span(NamedTuple):
    """Elements ``[begin, end)`` of the flat partition, inside one sub-group, that are treated alike as ``key`` says."""

    begin: int
    end: int
    key: int


class Piece(NamedTuple):
    """The part of a span that lies in one tasklet."""

    tasklet: int
    begin: int
    end: int
    sub_group: int
    key: int


class Memory(Protocol):
    """Where elements of the flat partition lie."""

    @property
    def dtype(self) -> native.DType:
        """Of the elements."""

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay there; if not, they only pass through it."""

    @property
    def stream(self) -> native.CudaStream | None:
        """What parameters travel on, if they lie in a CUDA device's memory; None: they lie in host memory."""

    def address(self, piece: Piece) -> int:
        """Of the piece's first element."""


class FlatMemory:
    """Memory that is contiguous for each sub-group.

    Args:
        layout: The partition.
        flats: One for each sub-group, all of one dtype.
        stream: As :class:`Memory`'s.
    """

    def __init__(
        self, layout: PartitionLayout, flats: Sequence[Flat], *, stream: native.CudaStream | None = None
    ) -> None:
        dtypes = {flat.dtype for flat in flats}
        assert len(flats) == len(layout.sub_groups) and len(dtypes) <= 1, "one flat per sub-group, of one dtype"
        for flat, sub_group in zip(flats, layout.sub_groups, strict=True):
            assert flat.numel == sub_group.numel, (flat, sub_group)
        self.stream = stream
        self.keeps_parameters = True
        self.dtype = dtypes.pop() if dtypes else native.DType.FLOAT32
        # Address that element 0 of the partition would have if its memory reached there.
        size = DTYPE_BYTES[self.dtype]
        self._origins = [f.address - g.offset * size for f, g in zip(flats, layout.sub_groups, strict=True)]
        self._size = size

    def address(self, piece: Piece) -> int:
        return self._origins[piece.sub_group] + piece.begin * self._size


class Compression(NamedTuple):
    """What a :class:`native.Tasklet` is told of its gradient's compression.

    Args:
        payload: Address that it is compressed to.
        payload_bytes: There are.
        residual: Address of its elements' residual; 0: none.
        padding: Offsets and lengths of what is no element of a parameter.
    """

    payload: int = 0
    payload_bytes: int = 0
    residual: int = 0
    padding: tuple[tuple[int, int], ...] = ()


class Places(NamedTuple):
    """Where a generation's extents lie and where the next one's go.

    Args:
        current: Where tasklets lie; anywhere if nothing is there yet.
        following: Where the batch writes those that it writes.
        generations: int64[num_tasklets], current; -1: nothing there yet.
        next_generation: That the batch writes.
        blocks: ``StateStore.blocks``.
    """

    current: Placement
    following: Placement
    generations: NDArray[np.int64]
    next_generation: int
    blocks: Sequence[native.Blocks | None]

    def tasklet(
        self,
        layout: PartitionLayout,
        index: int,
        segments: list[native.Segment],
        *,
        master_in_parameter: bool = False,
        compression: Compression = Compression(),  # noqa: B008  it is immutable
    ) -> native.Tasklet:
        """One tasklet of a batch, read at its current place and written at its next."""
        extents, where = layout.extents, layout.tasklets[index]
        return native.Tasklet(
            index=index,
            numel=where.numel,
            num_arrays=extents.num_arrays,
            extent_bytes=where.extent_bytes,
            read_file=int(self.current.devices[index]),
            read_offset=extents.place_offset(int(self.current.positions[index])),
            read_generation=max(0, int(self.generations[index])),
            write_file=int(self.following.devices[index]),
            write_offset=extents.place_offset(int(self.following.positions[index])),
            write_generation=self.next_generation,
            segments=segments,
            master_in_parameter=master_in_parameter,
            offset=where.offset,
            blocks=self.blocks[index],
            payload=compression.payload,
            payload_bytes=compression.payload_bytes,
            residual=compression.residual,
            padding=compression.padding,
        )


def spans_of(layout: PartitionLayout, keys: Sequence[int] | NDArray[np.int64]) -> list[Span]:
    """Cover the partition with spans: neighbouring parameters of one sub-group and key become one.

    Args:
        layout: The partition.
        keys: One for each parameter.
    """
    columns = layout.columns
    assert len(keys) == len(layout.parameters)
    (held,) = np.nonzero(columns.numels)
    if not len(held):
        return []
    key, sub_group = np.asarray(keys, np.int64)[held], columns.sub_groups[held]
    (changes,) = np.nonzero((np.diff(key) != 0) | (np.diff(sub_group) != 0))
    firsts, lasts = held[[0, *(changes + 1)]], held[[*changes, len(held) - 1]]
    begins, ends = columns.offsets[firsts], columns.offsets[lasts] + columns.numels[lasts]
    return list(map(Span, begins.tolist(), ends.tolist(), key[[0, *(changes + 1)]].tolist()))


def whole_sub_groups(layout: PartitionLayout, wanted: Iterable[int]) -> list[Span]:
    """One span for each of these sub-groups, the sub-group as its key."""
    groups = [layout.sub_groups[index] for index in wanted]
    return [Span(group.offset, group.offset + group.numel, group.index) for group in groups if group.numel]


def cut(layout: PartitionLayout, spans: Iterable[Span]) -> list[Piece]:
    """Cut spans, given in partition order, at tasklet borders."""
    numel = layout.extents.tasklet_numel
    pieces = []
    for begin, end, key in spans:
        sub_group = layout.sub_group_at(begin).index
        while begin < end:
            tasklet = begin // numel
            stop = min(end, (tasklet + 1) * numel)
            pieces.append(Piece(tasklet, begin, stop, sub_group, key))
            begin = stop
    return pieces


def tasklets_in(pieces: Iterable[Piece]) -> list[int]:
    """The tasklets of these pieces, each once, in partition order."""
    return [tasklet for tasklet, _ in groupby(pieces, key=lambda piece: piece.tasklet)]


def pieces_within(pieces: Sequence[Piece], tasklets: Sequence[int]) -> Sequence[Piece]:
    """The pieces from the lowest to the highest of these tasklets.

    Args:
        pieces: In partition order.
        tasklets: In any order; at least one.
    """
    first = bisect_left(pieces, min(tasklets), key=lambda piece: piece.tasklet)
    last = bisect_left(pieces, max(tasklets) + 1, lo=first, key=lambda piece: piece.tasklet)
    return pieces[first:last]


def segments_of(
    layout: PartitionLayout,
    pieces: Sequence[Piece],
    tasklets: Sequence[int],
    *,
    segment: Callable[[int, Piece], native.Segment],
) -> list[tuple[int, list[native.Segment]]]:
    """The segments of each of these tasklets, in their order.

    Args:
        layout: The partition.
        pieces: In partition order.
        tasklets: Those that are wanted.
        segment: Makes one segment from its offset in the tasklet and its piece.
    """
    if not tasklets:
        return []
    wanted, numel = set(tasklets), layout.extents.tasklet_numel
    made = {
        tasklet: [segment(piece.begin - tasklet * numel, piece) for piece in members]
        for tasklet, members in groupby(pieces_within(pieces, tasklets), key=lambda piece: piece.tasklet)
        if tasklet in wanted
    }
    return [(tasklet, made[tasklet]) for tasklet in tasklets if tasklet in made]
