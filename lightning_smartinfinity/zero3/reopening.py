"""Opens the optimizer state that an interrupted training has left on storage, to resume from it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.store import StateStore, StoreDescription
from lightning_smartinfinity.store.manifest import Manifest
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.zero3.collectives import gather, raising_together
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["recover_for_training"]


def recover_for_training(
    settings: OffloadSettings, layout: PartitionLayout, description: StoreDescription, group: ProcessGroup | None
) -> StateStore:
    """Open this rank's store at the newest training record that all ranks have, with its generation. Collective.

    Args:
        settings: Folders and transfer settings, the same on all ranks.
        layout: This rank's partition.
        description: The training's optimizer, arrays and parameters.
        group: Process group of all ranks.

    Raises:
        CheckpointError: There is nothing to resume from, or it belongs to another model, optimizer, number of processes
            or settings; raised on every rank.
        StorageError: The store cannot be opened; raised on every rank.
    """
    rank, transfer = dist.get_rank(group), settings.transfer
    points: set[tuple[int, int, bytes]] = set()
    with raising_together(group):
        manifest, records = StateStore.resumable(
            settings.storage, job=transfer.job, rank=rank, io_timeout=transfer.io_timeout
        )
        _check(manifest, layout, description, world_size=dist.get_world_size(group))
        points = {(record.number, record.generation, record.run) for record in records}
    common = set.intersection(*gather(points, group))
    if not common:
        raise CheckpointError(
            f"There is no training to resume in {', '.join(map(str, settings.storage))} (job {transfer.job!r}): the "
            "processes have no training record in common, as if none had completed a step.",
            "Begin anew, without resuming from storage, or pass a checkpoint.",
        )
    number, generation, _ = max(common)
    run = gather(uuid.uuid4().bytes, group)[0]
    with raising_together(group):
        store = StateStore.recover(
            settings.storage,
            job=transfer.job,
            rank=rank,
            newest=generation,
            training=number,
            run=run,
            direct_io=transfer.file_access,
            io_engine=transfer.io_engine,
            state_format=settings.state_format,
            io_timeout=transfer.io_timeout,
        )
    return store


def _check(manifest: Manifest, layout: PartitionLayout, description: StoreDescription, *, world_size: int) -> None:
    """Check that a store was made by a training like this one."""
    if manifest.world_size != world_size:
        raise _differs("number of processes", manifest.world_size, world_size, "Use as many processes")
    saved, expected = manifest.description, description
    if saved.optimizer != expected.optimizer:
        raise _differs("optimizer", saved.optimizer, expected.optimizer, "Use the same optimizer")
    difference = _first_difference(saved.parameters, expected.parameters)
    if difference is not None:
        raise _differs("model", *difference, "Build the model, its parameter groups and its precision as they were")
    for name, value in vars(layout.extents).items():
        if getattr(manifest.extents, name) != value:
            before, now = getattr(manifest.extents, name), value
            raise _differs(
                f"layout of state ({name})", before, now, "Use the storage folders and settings as they were"
            )


def _first_difference(saved: Sequence[object], expected: Sequence[object]) -> tuple[object, object] | None:
    if len(saved) != len(expected):
        return f"{len(saved)} parameters", f"{len(expected)} parameters"
    return next(((a, b) for a, b in zip(saved, expected, strict=True) if a != b), None)


def _differs(what: str, before: object, now: object, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"The training on storage cannot be resumed by this one: its {what} was {before!r}, and is {now!r} now.",
        f"{remedy}, or begin anew, without resuming from storage.",
    )
