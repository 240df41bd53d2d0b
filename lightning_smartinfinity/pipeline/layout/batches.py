"""Builds batches for a storage device from a layout and from memory addresses: arithmetic only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import Flat
from lightning_smartinfinity.storage.spread import Placement

__all__ = [
    "Compression",
    "DTYPE_BYTES",
    "FlatMemory",
    "Link",
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
    """Elements ``[begin, end)`` of the flat partition, inside one sub-group, with one key: all are treated alike."""

    begin: int
    end: int
    key: int


class Piece(NamedTuple):
    """The part of a span in one tasklet."""

    tasklet: int
    begin: int
    end: int
    sub_group: int
    key: int


class Link(Protocol):
    """The user of a CUDA device, as a submission sees it; ``parameters.cuda.CudaLink`` implements it for torch."""

    @property
    def stream(self) -> native.CudaStream:
        """The stream that copies parameters."""

    def take(self) -> None:
        """Make later copies run after the work already submitted to the user's stream."""

    def give(self) -> None:
        """Make later work of the user's stream run after the copies started so far."""

    def notice(self) -> None:
        """Record that a step begins on the user's current stream: later :meth:`points` include that stream."""

    def points(self) -> Sequence[native.CudaEvent]:
        """Return events recorded after all work submitted so far to the user's streams."""

    def warn_of_unregistered(self) -> None:
        """Warn, once, if host memory could not be registered."""


class Memory(Protocol):
    """Memory that holds elements of the flat partition."""

    @property
    def dtype(self) -> native.DType:
        """The elements' dtype."""

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay in this memory; False if they only pass through it."""

    @property
    def stream(self) -> native.CudaStream | None:
        """The stream that copies parameters in a CUDA device's memory; None for host memory."""

    def address(self, piece: Piece) -> int:
        """Return the address of the piece's first element."""


class FlatMemory:
    """Memory that is contiguous for each sub-group.

    Args:
        layout: The partition.
        flats: Memory of each sub-group, all of one dtype.
        link: Link to the user of the CUDA device that holds the memory; None means host memory.
    """

    def __init__(self, layout: PartitionLayout, flats: Sequence[Flat], *, link: Link | None = None) -> None:
        dtypes = {flat.dtype for flat in flats}
        assert len(flats) == len(layout.sub_groups) and len(dtypes) <= 1, "one flat per sub-group, of one dtype"
        for flat, sub_group in zip(flats, layout.sub_groups, strict=True):
            assert flat.numel == sub_group.numel, (flat, sub_group)
        self.stream = None if link is None else link.stream
        self.keeps_parameters = True
        self.dtype = dtypes.pop() if dtypes else native.DType.FLOAT32
        # For each sub-group: the address of the partition's element 0 if its memory extended that far.
        size = DTYPE_BYTES[self.dtype]
        self._origins = [f.address - g.offset * size for f, g in zip(flats, layout.sub_groups, strict=True)]
        self._size = size

    def address(self, piece: Piece) -> int:
        return self._origins[piece.sub_group] + piece.begin * self._size


class Compression(NamedTuple):
    """The fields of a :class:`native.Tasklet` for the compression of its gradient.

    Args:
        payload: Address of the memory for the payload.
        payload_bytes: Size of that memory.
        residual: Address of the residual of the tasklet's elements; 0 means there is none.
        padding: Offsets and lengths of elements that belong to no parameter.
    """

    payload: int = 0
    payload_bytes: int = 0
    residual: int = 0
    padding: tuple[tuple[int, int], ...] = ()


class Places(NamedTuple):
    """The places of a generation's extents and of the next generation's.

    Args:
        current: The tasklets' current places; arbitrary if nothing has been written.
        following: Places to which a batch writes tasklets.
        generations: int64[num_tasklets], current generation of each extent; -1 means never written.
        next_generation: Generation that a batch writes.
        blocks: ``StateStore.blocks``.
        writes_back: Whether a batch changes resident tasklets in memory only.
    """

    current: Placement
    following: Placement
    generations: NDArray[np.int64]
    next_generation: int
    blocks: Sequence[native.Blocks | None]
    writes_back: bool = False

    def tasklet(
        self,
        layout: PartitionLayout,
        index: int,
        segments: list[native.Segment],
        *,
        master_in_parameter: bool = False,
        compression: Compression = Compression(),  # noqa: B008  it is immutable
        gradient: native.GradientWindow | None = None,
    ) -> native.Tasklet:
        """Return one tasklet of a batch, which is read at its current place and written to its next place."""
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
            gradient=gradient,
        )


def spans_of(layout: PartitionLayout, keys: Sequence[int] | NDArray[np.int64]) -> list[Span]:
    """Cover the partition with spans: neighbouring parameters of the same sub-group and key share one.

    Args:
        layout: The partition.
        keys: Key of each parameter.
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
    """Return one span for each of these sub-groups, whose key is the sub-group's index."""
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
    """Return the tasklets of these pieces, each once, in partition order."""
    return [tasklet for tasklet, _ in groupby(pieces, key=lambda piece: piece.tasklet)]


def pieces_within(pieces: Sequence[Piece], tasklets: Sequence[int]) -> Sequence[Piece]:
    """Return the pieces from the lowest to the highest of these tasklets.

    Args:
        pieces: Pieces in partition order.
        tasklets: Tasklet indices in any order; at least one.
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
    """Return each of these tasklets, in the given order, with its segments.

    Args:
        layout: The partition.
        pieces: Pieces in partition order.
        tasklets: Tasklet indices; those without a piece are left out.
        segment: Makes a segment from its offset in the tasklet and its piece.
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
