"""Opens a rank's optimizer state on storage, together with all other ranks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.store import SpaceRequest, StateStore, StoreDescription, measure_space, require_space
from lightning_smartinfinity.transfer.handler import TransferHandler
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.plan import Flat, StagedPartition
from lightning_smartinfinity.transfer.rules import UpdateRule
from lightning_smartinfinity.zero3.collectives import gather, raise_together, raising_together
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["open_storage"]


def open_storage(
    settings: OffloadSettings,
    layout: PartitionLayout,
    rule: UpdateRule,
    *,
    dtype: torch.dtype,
    groups: Sequence[Mapping[str, Any]],
    masters: Sequence[Flat] | StagedPartition,
    group: Any,
) -> TransferHandler:
    """Create the store, open the device and write the first generation.

    Collective: if it fails on one rank it raises on every rank, and no rank leaves anything behind.

    Args:
        settings: Folders and transfer settings, alike on all ranks.
        layout: This rank's partition.
        rule: The optimizer's update rule.
        dtype: Of the parameters, for the manifest.
        groups: The optimizer's parameter groups, for the manifest.
        masters: This rank's partition: the masters are widened from it.
        group: Process group of all ranks.

    Raises:
        StorageError: A folder cannot be used, is locked or too small; on every rank.
    """
    require_space(_space_of_all_ranks(settings, layout, group))
    job_id = gather(uuid.uuid4().bytes, group)[0]
    opened = ExitStack()
    error: SmartInfinityError | None = None
    try:
        description = _describe(layout, rule, dtype, groups)
        store = _create_store(settings, layout, description, group, job_id)
        opened.callback(store.close, remove=True)
        handler = TransferHandler(layout, store, HostDevice(num_buffers=settings.transfer.num_buffers), rule=rule)
        opened.callback(handler.close, remove=True)
        handler.open()
        handler.initialize(masters)
    except SmartInfinityError as caught:
        error = caught
    except Exception as caught:
        # Whatever it is, the other ranks must not be left waiting.
        error = StorageError(f"Storage could not be opened: {caught!r}.", "Free memory or use another folder.")
    with opened:
        raise_together(error, group)
        opened.pop_all()
    return handler


def _create_store(
    settings: OffloadSettings, layout: PartitionLayout, description: StoreDescription, group: Any, job_id: bytes
) -> StateStore:
    return StateStore.create(
        settings.storage,
        config=settings.transfer,
        extents=layout.extents,
        description=description,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        job_id=job_id,
    )


def _space_of_all_ranks(settings: OffloadSettings, layout: PartitionLayout, group: Any) -> list[SpaceRequest]:
    requests: list[SpaceRequest] = []
    with raising_together(group):
        requests = measure_space(
            settings.storage,
            job=settings.transfer.job,
            rank=dist.get_rank(group),
            extents=layout.extents,
            num_parameters=len(layout.parameters),
        )
    return [request for of_rank in gather(requests, group) for request in of_rank]


def _describe(
    layout: PartitionLayout, rule: UpdateRule, dtype: torch.dtype, groups: Sequence[Mapping[str, Any]]
) -> StoreDescription:
    return StoreDescription(
        optimizer=rule.name,
        arrays=rule.arrays,
        parameters=tuple(
            {
                "name": piece.name,
                "numel": piece.numel,
                "real_numel": piece.real_numel,
                "group": piece.group,
                "sub_group": piece.sub_group,
                "dtype": str(dtype).removeprefix("torch."),
            }
            for piece in layout.parameters
        ),
        groups=tuple(_plain(group) for group in groups),
    )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: _scalar(value) for key, value in group.items() if key != "params"}
    return {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str, list))}


def _scalar(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_scalar(item) for item in value] if isinstance(value, (tuple, list)) else value
