"""Finds the interrupted training on storage that a training would resume, and its training record."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.storage import find_resumable
from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.jobs.archiving import plan_archiving
from lightning_smartinfinity.storage.jobs.trainings import Condition, Training, movers_of, trainings_in
from lightning_smartinfinity.storage.records.training_record import TrainingRecord
from lightning_smartinfinity.storage.state.parts import Part, find_parts
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.archiving import put_together, seen_parts
from lightning_smartinfinity.zero3.setup.reopening import newest_common

__all__ = ["FoundTraining", "archived_bytes", "find_interrupted", "next_record"]


class FoundTraining(NamedTuple):
    """An interrupted training on storage.

    Args:
        step: Optimizer steps after which it was interrupted; None if damage or a missing part hides that.
        is_damaged: Whether its manifest or its training records are damaged.
        has_room: Whether its storage folders have room for a second state of this size, and it may be archived.
    """

    step: int | None
    is_damaged: bool
    has_room: bool


def find_interrupted(settings: StrategySettings, group: ProcessGroup | None) -> FoundTraining | None:
    """Return the training that ``ckpt_path="storage"`` would resume, None if there is none. Collective.

    A training that cannot be resumed, because it is damaged or a drive is missing, is returned, too: resuming it raises
    the reason. A training of other storage folders, whose drive is mounted in the place of one of these, is not.

    Args:
        settings: Folders and transfer settings, the same on all ranks.
        group: Process group of all ranks.

    Raises:
        StorageError: A folder or file cannot be read; raised on every rank.
    """
    job, archive = settings.transfer.job, f"{settings.transfer.job}{ARCHIVE}"
    offload = OffloadSettings(**vars(settings))
    seen = seen_parts(offload, [job, archive], group)
    movers = movers_of(seen)
    found = [one for one in trainings_in(movers, job, archive) if one.condition is not Condition.NO_STEP]
    # A kill while the training was moving to another number of ranks: resuming moves it back first.
    found += [one for one in trainings_in(movers, archive, job) if any(part.successor for part in one.parts)]
    folders = gather([folder.absolute() for folder in offload.storage], group)
    found = [one for one in found if one.belongs_to(folders)]
    if not found:
        return None
    steps = [_step_of(training) for training in found]
    newest = None if None in steps else max(step for step in steps if step is not None)
    has_room = all(gather(_has_room([part for one in found for part in one.parts]), group))
    try:
        plan_archiving(seen, job=job, folders=folders)
    except StorageError:  # what was archived before must stay
        has_room = False
    return FoundTraining(newest, any(one.condition is Condition.DAMAGED for one in found), has_room)


def next_record(settings: StrategySettings, group: ProcessGroup | None) -> TrainingRecord:
    """Return the training record that a training is about to resume from. Collective.

    Parts of the training that a kill has left in two jobs are put together first, as when it resumes.

    Args:
        settings: Folders and transfer settings, the same on all ranks.
        group: Process group of all ranks.

    Returns:
        The record as this rank has it; if the training had another number of ranks, as its first rank has it.

    Raises:
        CheckpointError: There is nothing to resume from; raised on every rank.
        StorageError: The record cannot be read; raised on every rank.
    """
    offload, rank = OffloadSettings(**vars(settings)), dist.get_rank(group)
    put_together(offload, group)
    first = _first_of_other_ranks(offload, group)
    records: list[TrainingRecord] = []
    with raising_together(group):
        if first is None or rank == 0:
            folders = offload.storage if first is None else [Path(folder) for folder in first.folders]
            source = rank if first is None else 0
            _, records = find_resumable(
                folders, job=settings.transfer.job, rank=source, io_timeout=settings.transfer.io_timeout
            )
    if first is not None:
        records = gather(records, group)[0]
    common = newest_common(gather({_point(record) for record in records}, group), offload)
    return next(record for record in records if _point(record) == common)


def _first_of_other_ranks(settings: OffloadSettings, group: ProcessGroup | None) -> Part | None:
    """Return the first part of the training to resume if it had another number of ranks, else None."""
    found = trainings_in(movers_of(seen_parts(settings, [settings.transfer.job], group)), settings.transfer.job)
    parts = [part for one in found if one.condition is not Condition.NO_STEP for part in one.parts]
    if any(part.world_size == dist.get_world_size(group) for part in parts):
        return None
    return next((part for part in parts if (part.rank, part.device) == (0, 0)), None)


def _point(record: TrainingRecord) -> tuple[int, int, bytes]:
    return record.number, record.generation, record.run


def archived_bytes(settings: StrategySettings) -> tuple[str, int]:
    """Return the job that a new training moves an interrupted one to, and the bytes that this process finds there."""
    archive, parts = f"{settings.transfer.job}{ARCHIVE}", list[Part]()
    with suppress(StorageError), io_limit(settings.transfer.io_timeout):
        folders = settings.storage or ()
        parts = limited("Looking at", next(iter(folders), "."), find_parts, folders, [archive])
    return archive, sum(part.num_bytes for part in parts if part.store is not None)


def _has_room(parts: Sequence[Part]) -> bool:
    """Return whether the file systems of the parts on this machine have as much free space as the parts take."""
    needed, free = Counter[int](), dict[int, int]()
    for part in parts:
        if part.machine == machine_identity():
            with suppress(OSError):  # making the store reports it
                device = os.stat(part.storage).st_dev
                needed[device] += part.num_bytes
                free[device] = shutil.disk_usage(part.storage).free
    return all(free[device] >= num_bytes for device, num_bytes in needed.items() if device in free)


def _step_of(training: Training) -> int | None:
    return None if training.condition is Condition.DAMAGED or training.point is None else training.step
