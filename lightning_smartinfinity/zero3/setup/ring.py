"""Chooses the number of the ring's buffers, when the tasklets are known."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch.distributed import ProcessGroup

from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.ring import ring_buffers
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.io.mounts import num_drives
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["with_ring"]

_log = logging.getLogger(__name__)


def with_ring(settings: OffloadSettings, layout: PartitionLayout, group: ProcessGroup | None) -> OffloadSettings:
    """Return the settings with the number of ring buffers set by ``num_buffers``. Collective.

    Args:
        settings: The settings, with the number of threads that update.
        layout: This rank's partition.
        group: Process group of all ranks.
    """
    transfer = settings.transfer
    if isinstance(transfer.num_buffers, int) or settings.cards is not None:
        return settings
    assert isinstance(transfer.compute_threads, int)
    with raising_together(group), io_limit(transfer.io_timeout):
        drives = limited("Looking at", settings.storage[0], num_drives, settings.storage)
    own = measure_memory(reserved=0)
    local = [report for report in gather(own, group) if report.machine == own.machine]
    tasklet_bytes = max(settings.tasklet_bytes, layout.extents.place_bytes)
    number = ring_buffers(
        tasklet_bytes=tasklet_bytes,
        threads=transfer.compute_threads,
        drives=drives,
        processes=len(local),
        margin=min(report.margin for report in local),
    )
    _log.info("num_buffers='auto': %d buffers of %d bytes, for %d drives.", number, tasklet_bytes, drives)
    return replace(settings, transfer=replace(transfer, num_buffers=number))
