"""Describes trainings in manifests, and opens the state of an interrupted training on storage to resume from it."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.rules import UpdateRule
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage import StateStore, StoreDescription, find_resumable, recover_store
from lightning_smartinfinity.storage.folders.manifest import Manifest
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.state.parts import first_manifest
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.update_device import takes_tasklets
from lightning_smartinfinity.zero3.untyped import ParamGroup

__all__ = ["as_stored", "check_description", "describe_training", "newest_common", "recover_for_training"]


def describe_training(
    layout: PartitionLayout,
    rule: UpdateRule,
    dtype: torch.dtype,
    groups: Sequence[ParamGroup],
    *,
    tasklet_bytes: int,
) -> StoreDescription:
    """Return the description of a training for its store's manifest; a later training checks it before it resumes."""
    return StoreDescription(
        optimizer=rule.name,
        arrays=rule.arrays,
        parameters=tuple(
            {
                "name": parameter.name,
                "shape": list(parameter.shape),
                "numel": parameter.numel,
                "real_numel": parameter.real_numel,
                "group": parameter.group,
                "sub_group": parameter.sub_group,
                "dtype": str(dtype).removeprefix("torch."),
            }
            for parameter in layout.parameters
        ),
        groups=tuple(_plain(group) for group in groups),
        tasklet_bytes=tasklet_bytes,
    )


def _plain(group: ParamGroup) -> dict[str, object]:
    values = {key: _scalar(value) for key, value in group.items() if key != "params"}
    return {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str, list))}


def _scalar(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_scalar(item) for item in value] if isinstance(value, (tuple, list)) else value


def as_stored(layout: PartitionLayout, settings: OffloadSettings, group: ProcessGroup | None) -> PartitionLayout:
    """Return the layout with tasklets of the size that the state to resume from has, if only this size differs.

    Versions of this package may choose another size for the same settings. If the user has changed ``tasklet_bytes``,
    rank 0 warns that it has no effect: no result depends on it, unless gradients are compressed, and then the results
    are those of the training that was interrupted.

    Args:
        layout: This rank's partition, cut into tasklets by this version.
        settings: Folders and transfer settings. Parts of the training that a kill has left in another job are moved
            back already, since the manifest in this job may be another training's until then.
        group: Process group of all ranks.

    Raises:
        StorageTimeoutError: The disk does not answer; raised on every rank.
    """
    manifest: Manifest | None = None
    rank, job, limit = dist.get_rank(group), settings.transfer.job, settings.transfer.io_timeout
    with raising_together(group), io_limit(limit):
        first = Path(settings.storage[0]).absolute()
        manifest = limited("Looking for trainings in", first, first_manifest, first, job=job, rank=rank)
    if manifest is None or manifest.world_size != dist.get_world_size(group):
        return layout
    extents, before = manifest.extents, manifest.description.tasklet_bytes
    if replace(layout.extents, tasklet_numel=extents.tasklet_numel) != extents or not takes_tasklets(settings, extents):
        return layout  # an error names the difference
    if rank == 0 and before not in (0, settings.tasklet_bytes):
        warnings.warn(
            f"The training on storage goes on with tasklet_bytes={before}, as it was begun. The setting tasklet_bytes="
            f"{settings.tasklet_bytes} is for new state only.",
            stacklevel=2,
        )
    return replace(layout, extents=extents)


def recover_for_training(
    settings: OffloadSettings, layout: PartitionLayout, description: StoreDescription, group: ProcessGroup | None
) -> StateStore:
    """Open this rank's store at the generation of the newest training record that all ranks have. Collective.

    Args:
        settings: Folders and transfer settings, the same on all ranks.
        layout: This rank's partition.
        description: The training's optimizer, arrays and parameters.
        group: Process group of all ranks.

    Raises:
        CheckpointError: There is nothing to resume from, or the model, optimizer, number of processes or settings
            differ; raised on every rank.
        StorageError: The store cannot be opened; raised on every rank.
    """
    rank, transfer = dist.get_rank(group), settings.transfer
    points: set[tuple[int, int, bytes]] = set()
    with raising_together(group):
        manifest, records = find_resumable(
            settings.storage,
            job=transfer.job,
            rank=rank,
            io_timeout=transfer.io_timeout,
            check=settings.check_record,
        )
        _check(manifest, layout, description, world_size=dist.get_world_size(group))
        points = {(record.number, record.generation, record.run) for record in records}
    number, generation, _ = newest_common(gather(points, group), settings)
    run = gather(uuid.uuid4().bytes, group)[0]
    with raising_together(group):
        store = recover_store(
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


def newest_common(points: Sequence[set[tuple[int, int, bytes]]], settings: OffloadSettings) -> tuple[int, int, bytes]:
    """Return number, generation and run of the newest training record that all ranks of a training have.

    Args:
        points: For each rank, the number, generation and run of its records.
        settings: Settings with the training's folders, for the error.

    Raises:
        CheckpointError: The ranks have no record in common.
    """
    common = set.intersection(*points)
    if not common:
        why = "it left no training record" if len(points) == 1 else "the processes have no training record in common"
        raise CheckpointError(
            f"There is no training to resume in {', '.join(map(str, settings.storage))} (job {settings.transfer.job!r})"
            f": {why}, as after a kill in its first step; or, with durability='interval', before state in host memory "
            "was first written (TransferConfig(persist_every=...)).",
            user_calls().begin_anew,
        )
    return max(common)


def check_description(saved: StoreDescription, expected: StoreDescription, *, fields: Collection[str] = ()) -> None:
    """Check that a store belongs to a training of the same model and optimizer as this one.

    Args:
        saved: The store's description.
        expected: This training's description.
        fields: Fields of each parameter to compare; empty: all.

    Raises:
        CheckpointError: The optimizer or the model differs.
    """
    if saved.optimizer != expected.optimizer:
        raise _differs("optimizer", saved.optimizer, expected.optimizer, "Use the same optimizer")
    # Manifests from before 25 November 2026 have no shapes.
    unknown = {"shape"} if any("shape" not in parameter for parameter in saved.parameters) else set()
    before, now = (
        [
            {key: value for key, value in each.items() if (not fields or key in fields) and key not in unknown}
            for each in found.parameters
        ]
        for found in (saved, expected)
    )
    difference = _first_difference(before, now)
    if difference is not None:
        raise _differs("model", *difference, "Build the model, its parameter groups and its precision as they were")


def _check(manifest: Manifest, layout: PartitionLayout, description: StoreDescription, *, world_size: int) -> None:
    """Check that a store's number of ranks, model, optimizer and layout are those of this training."""
    if manifest.world_size != world_size:
        raise _differs("number of processes", manifest.world_size, world_size, "Use as many processes")
    check_description(manifest.description, description)
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
