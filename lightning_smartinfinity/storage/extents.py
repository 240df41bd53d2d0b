"""The extents that hold the tasklets' state, and the places where they may lie: arithmetic only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.storage.spread import apportion, interleave

__all__ = [
    "blocks_of",
    "BLOCK_BYTES",
    "CELL_NUMEL",
    "Extent",
    "ExtentMap",
    "extent_bytes",
]

BLOCK_BYTES = native.BLOCK_BYTES
"""Alignment of every region, extent and place: O_DIRECT requires it on today's devices."""

CELL_NUMEL = native.CELL_NUMEL
"""Grid of the flat partition: 8-bit codes share an exponent within one cell and one parameter."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One tasklet's state on storage.

    Args:
        numel: Number of elements of the tasklet.
        nbytes: Size of the extent in bytes, trailer included.
    """

    numel: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ExtentMap:
    """The extents of one rank's partition, and the files that have places for them.

    A device's file is a row of places, all of one size: any extent fits any place of any device. At first the
    tasklets are dealt round robin, and each file has ``places_per_tasklet`` places for each of its tasklets.

    Args:
        numel: Elements of the partition.
        tasklet_numel: Elements of every tasklet except the last, a multiple of the format's granule.
        num_arrays: Arrays per element (Adam: master, exp_avg, exp_avg_sq).
        num_devices: Number of storage folders.
        places_per_tasklet: Number of places for each tasklet's state (1 or 2).
        state_format: A name in ``STATE_FORMATS``.
        borders: First elements of the parameters that begin inside a cell, ascending: blocks end there.
        num_in_memory: Number of tasklets, from the first on, that have no place on storage; only with one place each.
    """

    numel: int
    tasklet_numel: int
    num_arrays: int
    num_devices: int
    places_per_tasklet: int
    state_format: str = "fp32"
    borders: tuple[int, ...] = ()
    num_in_memory: int = 0

    def __post_init__(self) -> None:
        assert self.numel >= 0 and self.num_arrays >= 1 and self.num_devices >= 1 and self.places_per_tasklet in (1, 2)
        assert self.tasklet_numel > 0 and self.tasklet_numel % self.format.granule == 0
        assert self.num_in_memory == 0 or (
            self.places_per_tasklet == 1 and 0 <= self.num_in_memory <= self.num_tasklets
        )
        assert not self.format.arrays or self.num_arrays == len(self.format.arrays), "the format holds other arrays"

    @property
    def format(self) -> native.StateFormat:
        """The format of the state in an extent."""
        return STATE_FORMATS[self.state_format]

    @property
    def num_tasklets(self) -> int:
        return -(-self.numel // self.tasklet_numel)

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """The extent of every tasklet, by tasklet index."""
        return tuple(self._extent(index) for index in range(self.num_tasklets))

    def borders_of(self, tasklet: int) -> tuple[int, ...]:
        """Return the elements of a tasklet where a block ends off the grid; none in a format without blocks."""
        if not self.format.has_blocks:
            return ()
        begin = tasklet * self.tasklet_numel
        end = min(begin + self.tasklet_numel, self.numel)
        inside = self.borders[bisect_right(self.borders, begin) : bisect_left(self.borders, end)]
        return tuple(border - begin for border in inside)

    @cached_property
    def place_bytes(self) -> int:
        """Bytes of every place, those of the largest extent on storage; 0 if no extent is on storage."""
        return max((extent.nbytes for extent in self.extents[self.num_in_memory :]), default=0)

    @cached_property
    def first_homes(self) -> NDArray[np.uint16]:
        """uint16[num_tasklets]: the device to which each tasklet is dealt at first; 0 for those in memory."""
        return self.homes(apportion([1.0] * self.num_devices, self.num_tasklets - self.num_in_memory))

    def homes(self, counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return uint16[num_tasklets]: each tasklet's device if device ``i`` gets ``counts[i]`` of those on storage."""
        return np.concatenate([np.zeros(self.num_in_memory, np.uint16), interleave(counts)])

    def num_places(self, device: int) -> int:
        """Return the number of places that the file of ``device`` has at first."""
        return self.places_per_tasklet * int((self.first_homes[self.num_in_memory :] == device).sum())

    def file_bytes(self, device: int) -> int:
        """Return the size of the file of ``device`` at first."""
        return self.place_offset(self.num_places(device))

    def place_offset(self, position: int) -> int:
        """Return the byte offset of a place in its file."""
        return position * self.place_bytes

    def _extent(self, index: int) -> Extent:
        numel = min(self.tasklet_numel, self.numel - index * self.tasklet_numel)
        nbytes = extent_bytes(
            numel, self.num_arrays, state_format=self.state_format, num_borders=len(self.borders_of(index))
        )
        return Extent(numel=numel, nbytes=nbytes)


def blocks_of(extents: ExtentMap) -> tuple[native.Blocks | None, ...]:
    """Return the cut of each tasklet's elements into blocks, for the native core; None means on the grid alone."""
    borders = (extents.borders_of(index) for index in range(extents.num_tasklets))
    return tuple(native.Blocks(list(found)) if found else None for found in borders)


def extent_bytes(numel: int, num_arrays: int, *, state_format: str = "fp32", num_borders: int = 0) -> int:
    """Return the bytes of an extent: its block-aligned regions and one block that ends with the trailer.

    Args:
        numel: Elements of the tasklet.
        num_arrays: Arrays per element.
        state_format: A name in ``STATE_FORMATS``.
        num_borders: Number of blocks beyond one for each cell.
    """
    return STATE_FORMATS[state_format].extent_bytes(numel, num_arrays, num_borders)
