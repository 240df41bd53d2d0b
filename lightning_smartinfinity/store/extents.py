"""Where every tasklet's state lies on storage: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["BLOCK_BYTES", "TASKLET_GRANULE", "Extent", "ExtentMap", "extent_bytes"]

BLOCK_BYTES = 4096
"""Alignment of every region, extent and slot: what O_DIRECT asks for on today's devices."""

TASKLET_GRANULE = 1024
"""Tasklets hold a multiple of this many elements, so that their regions need no padding (1024 * 4 B = one block)."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One tasklet's place on storage.

    Args:
        device: Index of the storage folder.
        numel: Number of elements of the tasklet.
        offset: Byte offset in the device's file within slot 0; slot ``s`` adds ``s * ExtentMap.slot_bytes(device)``.
        nbytes: Size of one slot's extent in bytes, trailer included.
    """

    device: int
    numel: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ExtentMap:
    """The extents of one rank's partition, dealt round robin over its storage folders.

    A device's file is slot 0 of all its tasklets, then slot 1: a step reads one half and writes the other, in order.

    Args:
        numel: Elements of the partition.
        tasklet_numel: Elements of every tasklet except the last, a multiple of ``TASKLET_GRANULE``.
        num_arrays: fp32 arrays per element (Adam: master, exp_avg, exp_avg_sq).
        num_devices: Storage folders.
        num_slots: Places a tasklet's state may lie (1 or 2).
    """

    numel: int
    tasklet_numel: int
    num_arrays: int
    num_devices: int
    num_slots: int

    def __post_init__(self) -> None:
        assert self.numel >= 0 and self.num_arrays >= 1 and self.num_devices >= 1 and self.num_slots in (1, 2)
        assert self.tasklet_numel > 0 and self.tasklet_numel % TASKLET_GRANULE == 0

    @property
    def num_tasklets(self) -> int:
        return -(-self.numel // self.tasklet_numel)

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """The extent of every tasklet, by tasklet index."""
        return tuple(self._extent(index) for index in range(self.num_tasklets))

    def slot_bytes(self, device: int) -> int:
        """Bytes of one slot of all the tasklets of ``device``."""
        return self._slot_bytes[device]

    def file_bytes(self, device: int) -> int:
        """Size of the state file of ``device``, every slot included."""
        return self.num_slots * self._slot_bytes[device]

    def slot_offset(self, tasklet: int, slot: int) -> int:
        """Byte offset of ``tasklet`` in its device's file when it lies in ``slot``."""
        assert 0 <= slot < self.num_slots
        extent = self.extents[tasklet]
        return slot * self._slot_bytes[extent.device] + extent.offset

    def _extent(self, index: int) -> Extent:
        numel = min(self.tasklet_numel, self.numel - index * self.tasklet_numel)
        device, row = index % self.num_devices, index // self.num_devices
        return Extent(
            device=device,
            numel=numel,
            offset=row * extent_bytes(self.tasklet_numel, self.num_arrays),
            nbytes=extent_bytes(numel, self.num_arrays),
        )

    @cached_property
    def _slot_bytes(self) -> tuple[int, ...]:
        totals = [0] * self.num_devices
        for extent in self.extents:
            totals[extent.device] += extent.nbytes
        return tuple(totals)


def extent_bytes(numel: int, num_arrays: int) -> int:
    """Bytes of an extent: ``num_arrays`` block-aligned fp32 regions and one block that ends in the trailer."""
    region = -(-4 * numel // BLOCK_BYTES) * BLOCK_BYTES
    return num_arrays * region + BLOCK_BYTES
