"""The extents that hold the tasklets' state, and the places that they may lie at: arithmetic only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.store.spread import apportion, interleave

__all__ = [
    "BLOCK_BYTES",
    "CELL_NUMEL",
    "STATE_FORMATS",
    "Extent",
    "ExtentMap",
    "StateFormat",
    "extent_bytes",
]

BLOCK_BYTES = 4096
"""Alignment of every region, extent and place: what O_DIRECT asks for on today's devices."""

CELL_NUMEL = 256
"""Grid of the flat partition: 8-bit codes share an exponent within one cell and one parameter."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How an element's state lies in an extent; the native core's ``StateFormat`` and ``Regions`` say the same.

    Args:
        number: In every extent's trailer.
        item_bytes: Bytes per element of each region; empty: one region of fp32 for each array.
        has_blocks: A further region holds two bytes for each block of 8-bit codes.
    """

    number: int
    item_bytes: tuple[int, ...]
    has_blocks: bool = False

    @property
    def granule(self) -> int:
        """Tasklets hold a multiple of this many elements: no region of elements needs padding, no cell is cut."""
        return BLOCK_BYTES // min(self.item_bytes, default=4)

    def region_bytes(self, numel: int, num_arrays: int, num_blocks: int) -> tuple[int, ...]:
        """Of each region, in whole blocks."""
        items = self.item_bytes or num_arrays * (4,)
        exponents = (2 * num_blocks,) if self.has_blocks else ()
        return tuple(_whole_blocks(used) for used in (*(item * numel for item in items), *exponents))


STATE_FORMATS: Mapping[str, StateFormat] = {
    "fp32": StateFormat(0, ()),
    "bf16": StateFormat(1, (4, 2, 2)),
    "int8": StateFormat(2, (4, 1, 1), has_blocks=True),
    "int8_remainder": StateFormat(3, (2, 2, 1, 1), has_blocks=True),
}
"""By the name that users choose."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One tasklet's state on storage.

    Args:
        numel: Number of elements of the tasklet.
        nbytes: Its size in bytes, trailer included.
    """

    numel: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ExtentMap:
    """The extents of one rank's partition, and the files that have places for them.

    A device's file is a row of places, all of one size: any extent fits any place of any device. At first the
    tasklets are dealt round robin, and each file has ``num_slots`` places for each of its own.

    Args:
        numel: Elements of the partition.
        tasklet_numel: Elements of every tasklet except the last, a multiple of the format's granule.
        num_arrays: Arrays per element (Adam: master, exp_avg, exp_avg_sq).
        num_devices: Storage folders.
        num_slots: Places a tasklet's state may lie (1 or 2).
        state_format: A name in ``STATE_FORMATS``.
        borders: Elements off the grid of cells that begin a parameter, ascending: blocks end there.
        num_in_memory: Tasklets, from the first on, that have no place on storage; with ``num_slots=1`` only.
    """

    numel: int
    tasklet_numel: int
    num_arrays: int
    num_devices: int
    num_slots: int
    state_format: str = "fp32"
    borders: tuple[int, ...] = ()
    num_in_memory: int = 0

    def __post_init__(self) -> None:
        assert self.numel >= 0 and self.num_arrays >= 1 and self.num_devices >= 1 and self.num_slots in (1, 2)
        assert self.tasklet_numel > 0 and self.tasklet_numel % self.format.granule == 0
        assert self.num_in_memory == 0 or (self.num_slots == 1 and 0 <= self.num_in_memory <= self.num_tasklets)
        assert not self.format.item_bytes or self.num_arrays == 3, "such a format holds a master and two moments"

    @property
    def format(self) -> StateFormat:
        """How state lies in an extent."""
        return STATE_FORMATS[self.state_format]

    @property
    def num_tasklets(self) -> int:
        return -(-self.numel // self.tasklet_numel)

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """The extent of every tasklet, by tasklet index."""
        return tuple(self._extent(index) for index in range(self.num_tasklets))

    def borders_of(self, tasklet: int) -> tuple[int, ...]:
        """Elements of a tasklet where a block ends beside the grid; none in a format without blocks."""
        if not self.format.has_blocks:
            return ()
        begin = tasklet * self.tasklet_numel
        end = min(begin + self.tasklet_numel, self.numel)
        inside = self.borders[bisect_right(self.borders, begin) : bisect_left(self.borders, end)]
        return tuple(border - begin for border in inside)

    @cached_property
    def place_bytes(self) -> int:
        """Bytes of every place: of the largest extent on storage; 0 without any."""
        return max((extent.nbytes for extent in self.extents[self.num_in_memory :]), default=0)

    @cached_property
    def first_homes(self) -> NDArray[np.uint16]:
        """uint16[num_tasklets]: the device to which each tasklet is dealt at first; 0 for those in memory."""
        return self.homes(apportion([1.0] * self.num_devices, self.num_tasklets - self.num_in_memory))

    def homes(self, counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint16]:
        """uint16[num_tasklets]: the device of each tasklet if each device has so many of those on storage."""
        return np.concatenate([np.zeros(self.num_in_memory, np.uint16), interleave(counts)])

    def num_places(self, device: int) -> int:
        """Places that the file of ``device`` has at first."""
        return self.num_slots * int((self.first_homes[self.num_in_memory :] == device).sum())

    def file_bytes(self, device: int) -> int:
        """Size of the file of ``device`` at first."""
        return self.place_offset(self.num_places(device))

    def place_offset(self, position: int) -> int:
        """Byte offset of a place in its file."""
        return position * self.place_bytes

    def _extent(self, index: int) -> Extent:
        numel = min(self.tasklet_numel, self.numel - index * self.tasklet_numel)
        nbytes = extent_bytes(
            numel, self.num_arrays, state_format=self.state_format, num_borders=len(self.borders_of(index))
        )
        return Extent(numel=numel, nbytes=nbytes)


def extent_bytes(numel: int, num_arrays: int, *, state_format: str = "fp32", num_borders: int = 0) -> int:
    """Bytes of an extent: its block-aligned regions and one block that ends in the trailer.

    Args:
        numel: Elements of the tasklet.
        num_arrays: Arrays per element.
        state_format: A name in ``STATE_FORMATS``.
        num_borders: Blocks beyond one for each cell.
    """
    num_blocks = -(-numel // CELL_NUMEL) + num_borders
    return sum(STATE_FORMATS[state_format].region_bytes(numel, num_arrays, num_blocks)) + BLOCK_BYTES


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
