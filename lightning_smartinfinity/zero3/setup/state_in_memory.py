"""Chooses how much of a rank's optimizer state stays in host memory, and allocates that memory."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.distributed import ProcessGroup

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.pipeline.layout.free_memory import (
    MemoryReport,
    measure_memory,
    share_of_memory,
    stays_free,
)
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout, with_residents
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.io.mounts import is_in_memory
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["claim_cache", "with_cache"]

_log = logging.getLogger(__name__)

_FP32_BYTES = 4
_PIECES = 32  # memory is allocated in about 32 pieces; free memory is measured again after each
_LEAST_PIECE = 64 << 20


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """The most bytes of state that a rank keeps in memory.

    Args:
        nbytes: The bytes.
        reason: Where they come from, for the log.
        reports: All ranks' reports of the memory from which the bytes were computed; None if the user set them.
    """

    nbytes: int
    reason: str
    reports: Sequence[MemoryReport] | None = None


def with_cache(
    layout: PartitionLayout, settings: OffloadSettings, group: ProcessGroup | None, *, itemsize: int
) -> PartitionLayout:
    """Return the layout with the resident tasklets set by ``dram_cache_bytes``; none on cards. Collective.

    Args:
        layout: This rank's partition, without resident tasklets.
        settings: The settings.
        group: Process group of all ranks.
        itemsize: Bytes per element of gradients in host memory.
    """
    if settings.cards is not None:
        return layout
    limit = _limit(layout, settings, group, itemsize=itemsize)
    return with_residents(layout, nbytes=limit.nbytes, written_through=settings.transfer.writes_through)


def claim_cache(
    layout: PartitionLayout, settings: OffloadSettings, group: ProcessGroup | None, *, itemsize: int
) -> tuple[PartitionLayout, list[native.HostBuffer]]:
    """Allocate memory for resident tasklets, and log its size. Collective.

    Memory of the default size is in use once this returns, so that processes that start later do not take it for free.
    If the system gives less, or other processes take memory at the same time, fewer tasklets are resident.

    Args:
        layout: As in :func:`with_cache`.
        settings: As in :func:`with_cache`.
        group: As in :func:`with_cache`.
        itemsize: As in :func:`with_cache`.

    Returns:
        The layout with its resident tasklets, and their memory in pieces that hold whole extents.

    Raises:
        ConfigError: The system refuses a size that the user set; raised on every rank.
    """
    if settings.cards is not None:
        return layout, []
    limit = _limit(layout, settings, group, itemsize=itemsize)
    sizes = [extent.nbytes for extent in layout.extents.extents]
    through = settings.transfer.writes_through
    wanted = sizes[: with_residents(layout, nbytes=limit.nbytes, written_through=through).num_resident]
    memory: list[native.HostBuffer] = []
    with raising_together(group):
        memory, shortage = _allocate(wanted, limit)
        if shortage:
            limit = replace(limit, nbytes=sum(piece.nbytes for piece in memory), reason=shortage)
    layout = with_residents(layout, nbytes=limit.nbytes, written_through=through)
    _log.info(
        "%.2f of %.2f GiB of this process's optimizer state stay in host memory; the limit is %.2f GiB: %s.",
        sum(sizes[: layout.num_resident]) / 2**30,
        sum(sizes) / 2**30,
        limit.nbytes / 2**30,
        limit.reason,
    )
    return layout, memory


def _limit(layout: PartitionLayout, settings: OffloadSettings, group: ProcessGroup | None, *, itemsize: int) -> _Limit:
    wanted = settings.transfer.dram_cache_bytes
    if isinstance(wanted, int):
        return _Limit(nbytes=wanted, reason="dram_cache_bytes")
    own = measure_memory(reserved=_still_to_allocate(layout, settings, itemsize=itemsize))
    reports, in_memory = gather(own, group), []
    with raising_together(group), io_limit(settings.transfer.io_timeout):
        in_memory = [each for each in settings.storage if limited("Looking at", each, is_in_memory, each)]
    if in_memory:
        return _Limit(nbytes=0, reason=f"the files in {str(in_memory[0])!r} are in memory already", reports=reports)
    reason = "its share of what is free, except for a quarter of all memory"
    return _Limit(nbytes=share_of_memory(reports, own), reason=reason, reports=reports)


def _still_to_allocate(layout: PartitionLayout, settings: OffloadSettings, *, itemsize: int) -> int:
    """Return the bytes of host memory that the training takes after the size of the cache was chosen."""
    transfer, gradients = settings.transfer, itemsize * layout.numel
    if isinstance(transfer.gradient_bytes, int):
        gradients = min(gradients, transfer.gradient_bytes)
    has_residual = settings.compression is not None and settings.compression.keeps_residual
    residual = _FP32_BYTES * layout.numel if has_residual else 0
    ring = settings.num_buffers * max(settings.tasklet_bytes, layout.extents.place_bytes)
    pool = settings.activations.host_bytes if settings.activations is not None else 0
    # Slots, or a staging buffer, are about as large as the ring at most.
    return gradients + residual + 2 * ring + (pool if isinstance(pool, int) else 0)


def _allocate(sizes: Sequence[int], limit: _Limit) -> tuple[list[native.HostBuffer], str]:
    """Return memory for the first of these extents, and why there is none for all of them.

    Raises:
        ConfigError: The system refuses a size that the user set.
    """
    memory: list[native.HostBuffer] = []
    for nbytes in _pieces(sizes):
        try:
            piece = native.HostBuffer(nbytes)
        except OSError as error:
            if limit.reports is None:
                raise ConfigError(
                    f"TransferConfig(dram_cache_bytes={limit.nbytes}): {sum(sizes)} bytes of optimizer state would "
                    f"stay in host memory, and the system refuses so much: {error.strerror}.",
                    "Pass less, or 'auto' for as much as is free.",
                ) from error
            return memory, f"the system refuses more ({error.strerror})"
        if limit.reports is not None:
            np.frombuffer(piece.memoryview(), np.uint8)[:: mmap.PAGESIZE] = 0  # memory counts as used once written
            if not stays_free(limit.reports, measure_memory(reserved=0)):
                return memory, "other processes have taken memory meanwhile"
        memory.append(piece)
    return memory, ""


def _pieces(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the sizes of pieces that hold whole extents."""
    least, piece = max(_LEAST_PIECE, sum(sizes) // _PIECES), 0
    for size in sizes:
        piece += size
        if piece >= least:
            yield piece
            piece = 0
    if piece:
        yield piece
