"""Archives an interrupted training: all ranks move their parts, or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage import SpaceRequest
from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE
from lightning_smartinfinity.storage.io.deadlines import in_time, io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.jobs.archiving import Plan, plan_archiving, plan_putting_together
from lightning_smartinfinity.storage.jobs.mover import Mover
from lightning_smartinfinity.storage.jobs.trainings import jobs_beside
from lightning_smartinfinity.storage.state.parts import Part, find_parts
from lightning_smartinfinity.storage.state.space import measure_parts
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["carry_out", "plan_moves", "put_together", "seen_parts", "archive", "space_of"]

_log = logging.getLogger(__name__)


def plan_moves(settings: OffloadSettings, group: ProcessGroup | None) -> Plan:
    """Plan the moves that are needed before a new training begins; nothing changes yet. Collective.

    Raises:
        StorageError: The job's folders hold something that must stay; raised on every rank.
    """
    job = settings.transfer.job
    return plan_archiving(
        seen_parts(settings, [job, f"{job}{ARCHIVE}"], group),
        job=job,
        folders=gather([folder.absolute() for folder in settings.storage], group),
    )


def space_of(plan: Plan, rank: int) -> list[SpaceRequest]:
    """Return the parts that a rank deletes, moves or leaves by a plan, as space requests of zero bytes.

    Raises:
        StorageError: The free space of a folder cannot be read.
    """
    return [
        *measure_parts(plan.deleted_by(rank), deleted=True),
        *measure_parts([*plan.moved_by(rank), *plan.left_to(rank)], deleted=False),
    ]


def archive(plan: Plan, settings: OffloadSettings, group: ProcessGroup | None) -> None:
    """Carry out a plan of :func:`plan_moves`: all ranks move their parts, or none does. Collective.

    Raises:
        StorageError: A part cannot be moved; raised on every rank.
    """
    if not plan.changes_something:
        return
    carry_out(plan, settings, group)
    if plan.moved and dist.get_rank(group) == 0:
        _log.warning("%s", _told(plan))


def _told(plan: Plan) -> str:
    """Return the message to users about a training that was archived."""
    path, job = str(plan.moved[0][1].path), plan.job
    removal = f"to remove it, run: smart-infinity jobs {' '.join(map(str, plan.storage))} --remove {job}"
    if plan.lost_storage:
        lost = ", ".join(plan.lost_storage)
        ours = (None, plan.moved[0][1].store)
        others = {part.store: repr(str(part.path)) for _, part in plan.moved[::-1] if part.store not in ours}
        also = f". It removes the training in {', '.join(others.values())}, too, which was also moved" if others else ""
        return (
            f"{path!r} holds a part of an interrupted training, whose part in {lost} cannot be found. Nothing was "
            f"deleted: what is here was moved to the job {job!r}. To resume it, mount {lost}, and train with "
            f"{user_calls().from_storage} and transfer={{'job': {job!r}}}. Only one that is known to have "
            f"more steps replaces it; {removal}{also}"
        )
    if plan.is_damaged:
        return (
            f"{path!r} holds an interrupted training that cannot be resumed, because its manifest or records are "
            f"damaged. It was not deleted but moved to the job {job!r}. Only one that is known to have more steps "
            f"replaces it; {removal}"
        )
    replaced = ""
    if plan.replaced is not None:
        replaced = f", and replaced the one there, which was interrupted after step {plan.replaced}"
    elif plan.replaces_damaged:
        replaced = ", and replaced the one there, which was damaged or incomplete"
    return (
        f"{path!r} holds a training that was interrupted after step {plan.step}. It was moved to the job {job!r}"
        f"{replaced}. The next one that is moved replaces it. To resume it, train with {user_calls().from_storage} and "
        f"transfer={{'job': {job!r}}}; {removal}"
    )


def put_together(settings: OffloadSettings, group: ProcessGroup | None) -> None:
    """Move all parts of a training to resume to its job, if a kill has left them in two places. Collective.

    If the training was being moved to another number of ranks, the complete set of stores, old or new, is kept.

    Raises:
        StorageError: A part cannot be moved, or the training is in another job; raised on every rank.
    """
    job = settings.transfer.job
    plan = plan_putting_together(seen_parts(settings, jobs_beside(job), group), job=job)
    if plan.changes_something:
        carry_out(plan, settings, group)


def seen_parts(settings: OffloadSettings, jobs: Sequence[str], group: ProcessGroup | None) -> list[list[Part]]:
    """Return, for each rank, the parts of these jobs that it sees in its storage folders. Collective.

    Raises:
        StorageError: A folder or file cannot be read; raised on every rank.
    """
    parts: list[Part] = []
    with raising_together(group), io_limit(settings.transfer.io_timeout):
        first = Path(settings.storage[0]).absolute()
        parts = limited("Looking for trainings in", first, find_parts, settings.storage, jobs)
    return gather(parts, group)


def carry_out(plan: Plan, settings: OffloadSettings, group: ProcessGroup | None) -> None:
    """Carry out a plan: all ranks do their share, or none does. Collective.

    Raises:
        StorageError: A part cannot be moved or deleted; raised on every rank.
    """
    path, seconds = Path(settings.storage[0], plan.job), settings.transfer.io_timeout
    with closing(Mover(plan, rank=dist.get_rank(group))) as mover:
        stages: list[tuple[Callable[[], None], str]] = [
            (mover.claim, "Locking"),
            (mover.disown, "Deleting the manifests replaced by"),
            (mover.make_room, "Deleting the files replaced by"),
            (mover.move, "Moving"),
        ]
        for stage, doing in stages:
            with raising_together(group):
                in_time(stage, doing=doing, path=path, seconds=seconds, undo=lambda _: mover.close())
