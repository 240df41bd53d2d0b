"""Sizes of the extents that hold the tasklets' state, and of the places that store them: arithmetic only."""

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
"""Elements of a cell of the flat partition: 8-bit codes within one cell and one parameter share an exponent."""


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
    """The extents of one rank's partition, and the state files with places for them.

    A device's file is a sequence of places of equal size, so any extent fits any place of any device. Initially,
    tasklets are assigned to devices round robin, and each file has ``places_per_tasklet`` places for each of its
    tasklets.

    Args:
        numel: Elements of the partition.
        tasklet_numel: Elements of every tasklet except the last, a multiple of the format's granule.
        num_arrays: Arrays per element (Adam: master, exp_avg, exp_avg_sq).
        num_devices: Number of storage folders.
        places_per_tasklet: Number of places for each tasklet's state (1 or 2).
        state_format: A name in ``STATE_FORMATS``.
        borders: First elements of the parameters that begin inside a cell, ascending. A block ends before each.
        num_in_memory: Number of leading tasklets without a place on storage; above 0 only with one place per tasklet.
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
        """Return the elements of a tasklet at which a block ends off the grid; empty for formats without blocks."""
        if not self.format.has_blocks:
            return ()
        begin = tasklet * self.tasklet_numel
        end = min(begin + self.tasklet_numel, self.numel)
        inside = self.borders[bisect_right(self.borders, begin) : bisect_left(self.borders, end)]
        return tuple(border - begin for border in inside)

    @cached_property
    def place_bytes(self) -> int:
        """Size of every place in bytes: that of the largest extent on storage, or 0 if no extent is on storage."""
        return max((extent.nbytes for extent in self.extents[self.num_in_memory :]), default=0)

    @cached_property
    def first_assigned(self) -> NDArray[np.uint16]:
        """uint16[num_tasklets]: the device initially assigned to each tasklet; 0 for tasklets in memory."""
        return self.assigned(apportion([1.0] * self.num_devices, self.num_tasklets - self.num_in_memory))

    def assigned(self, counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return each tasklet's device, uint16[num_tasklets]: device ``i`` gets ``counts[i]`` tasklets on storage."""
        return np.concatenate([np.zeros(self.num_in_memory, np.uint16), interleave(counts)])

    def num_places(self, device: int) -> int:
        """Return the initial number of places in the file of ``device``."""
        return self.places_per_tasklet * int((self.first_assigned[self.num_in_memory :] == device).sum())

    def file_bytes(self, device: int) -> int:
        """Return the initial size of the file of ``device``, in bytes."""
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
    """Return how each tasklet's elements are divided into blocks, for the native core; None: by the grid alone."""
    borders = (extents.borders_of(index) for index in range(extents.num_tasklets))
    return tuple(native.Blocks(list(found)) if found else None for found in borders)


def extent_bytes(numel: int, num_arrays: int, *, state_format: str = "fp32", num_borders: int = 0) -> int:
    """Return the size of an extent in bytes: block-aligned regions, and one block that ends with the trailer.

    Args:
        numel: Elements of the tasklet.
        num_arrays: Arrays per element.
        state_format: A name in ``STATE_FORMATS``.
        num_borders: Number of blocks in addition to one per cell.
    """
    return STATE_FORMATS[state_format].extent_bytes(numel, num_arrays, num_borders)
