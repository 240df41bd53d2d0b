"""Resumes an interrupted training from storage on another number of ranks.

The old stores are archived, the new ranks' stores are filled from them window by window, and then the old ones are
deleted. After a kill at any moment, either the old or the new stores are complete, and the next start uses these
(:func:`~lightning_smartinfinity.zero3.setup.archiving.put_together`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.state.state_access import StateAccess
from lightning_smartinfinity.pipeline.state.stored_state import StoredState
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.storage import StateStore, StoreDescription, find_resumable
from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE
from lightning_smartinfinity.storage.folders.rank_folder import rank_folder_path
from lightning_smartinfinity.storage.jobs.archiving import Plan, plan_making_way
from lightning_smartinfinity.storage.jobs.trainings import Condition, Training, movers_of, trainings_in
from lightning_smartinfinity.storage.records.training_record import TrainingRecord
from lightning_smartinfinity.storage.state.parts import Part
from lightning_smartinfinity.storage.state.recovery import require_recoverable
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together, show_on_rank_zero
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.archiving import carry_out, seen_parts
from lightning_smartinfinity.zero3.setup.reopening import check_description, newest_common

__all__ = ["Predecessor", "fill_successor", "find_predecessor", "make_way", "plan_way"]

_log = logging.getLogger(__name__)

_SAME = ("name", "shape", "group", "dtype")  # fields of a parameter that do not depend on the number of ranks
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Predecessor:
    """An interrupted training of another number of ranks.

    Args:
        training: The parts of the interrupted training.
        folders: The storage folders of each of its ranks, as this process sees them.
        record: The training record to resume from, as its first rank has it.
        seen: For each rank of this training, the parts of the job and of ``<job>.aside`` that it sees.
    """

    training: Training
    folders: tuple[tuple[Path, ...], ...]
    record: TrainingRecord
    seen: list[list[Part]]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the interrupted training."""
        return self.training.parts[0].world_size


def find_predecessor(
    settings: OffloadSettings, description: StoreDescription, group: ProcessGroup | None
) -> Predecessor | None:
    """Return the training to resume if it had another number of ranks, else None. Changes nothing. Collective.

    Args:
        settings: Folders and transfer settings, the same on all ranks.
        description: This training's optimizer, arrays and parameters.
        group: Process group of all ranks.

    Raises:
        CheckpointError: The training has another model or optimizer; raised on every rank.
        StorageError: A part of the training cannot be found or read; raised on every rank.
    """
    job, rank, num_ranks = settings.transfer.job, dist.get_rank(group), dist.get_world_size(group)
    seen = seen_parts(settings, [job, f"{job}{ARCHIVE}"], group)
    now = gather([folder.absolute() for folder in settings.storage], group)
    training = _of_other_ranks(seen, job, num_ranks, now)
    if training is None:
        return None
    folders: tuple[tuple[Path, ...], ...] = ()
    points: dict[int, set[tuple[int, int, bytes]]] = {}
    first: list[TrainingRecord] = []
    with raising_together(group):
        folders = _folders_here(training, seen[rank], rank=rank)
        for source in range(rank, len(folders), num_ranks):
            manifest, records = find_resumable(
                folders[source],
                job=job,
                rank=source,
                io_timeout=settings.transfer.io_timeout,
                check=settings.check_record,
            )
            require_recoverable(folders[source][0], manifest, state_format=None)
            check_description(manifest.description, description, fields=_SAME)
            points[source] = {(record.number, record.generation, record.run) for record in records}
            first = records if source == 0 else first
    common = newest_common([found for of_rank in gather(points, group) for found in of_rank.values()], settings)
    first = gather(first, group)[0]
    record = next(each for each in first if (each.number, each.generation, each.run) == common)
    return Predecessor(training=training, folders=folders, record=record, seen=seen)


def _of_other_ranks(
    seen: Sequence[Sequence[Part]], job: str, num_ranks: int, now: Sequence[Sequence[Path]]
) -> Training | None:
    wanted = (Condition.RESUMABLE, Condition.TORN)
    found = [one for one in trainings_in(movers_of(seen), job) if one.condition in wanted]
    if not found or any(one.parts[0].world_size == num_ranks for one in found):
        return None
    training = found[0]
    if training.missing is not None:
        path, lost = rank_folder_path(Path(), job=job, rank=training.missing[0]), training.missing_storage(now)
        raise StorageError(
            f"{str(training.parts[0].path)!r} holds a part of a training of {training.parts[0].world_size} processes. "
            f"To resume it on {num_ranks} takes all of its parts, and {str(path)!r} in {lost} cannot be found.",
            f"Mount {lost}, or copy the part there from the machine that has it (cp -r).",
        )
    return training


def _folders_here(training: Training, seen: Sequence[Part], *, rank: int) -> tuple[tuple[Path, ...], ...]:
    """Return the storage folders of each rank of a training; raise if this process, which may need any, lacks one."""
    here = {(part.rank, part.device): part.storage for part in seen if part.store == training.parts[0].store}
    for part in training.parts:
        if (part.rank, part.device) not in here:
            raise StorageError(
                f"Rank {rank} cannot reach {str(part.path)!r}, which holds a part of the training to resume.",
                f"{_by_checkpoint(part.world_size)}, or let all processes see all storage folders.",
            )
    num_devices = len(training.parts[0].folders)
    return tuple(
        tuple(here[source, device] for device in range(num_devices)) for source in range(training.parts[0].world_size)
    )


def _by_checkpoint(num_ranks: int) -> str:
    return f"Resume with {num_ranks} processes, save a checkpoint, and resume from that"


def plan_way(predecessor: Predecessor, settings: OffloadSettings, successor: bytes) -> Plan:
    """Plan the moves that are needed before the new stores are created.

    Args:
        predecessor: The training.
        settings: Folders and transfer settings.
        successor: Job id of the new stores.

    Raises:
        StorageError: A training that was archived before must stay; raised on every rank.
    """
    job = settings.transfer.job
    return plan_making_way(predecessor.seen, job=job, training=predecessor.training, successor=successor)


def make_way(
    plan: Plan,
    predecessor: Predecessor,
    settings: OffloadSettings,
    group: ProcessGroup | None,
    *,
    require_room: Callable[[], None],
) -> None:
    """Archive a training if there is room for the new stores in addition to it. Collective.

    Args:
        plan: A plan of :func:`plan_way`.
        predecessor: The training.
        settings: Folders and transfer settings.
        group: Process group of all ranks.
        require_room: Function that raises StorageFullError if there is no room.

    Raises:
        StorageFullError: There is no room; raised on every rank.
        StorageError: A part cannot be moved; raised on every rank.
    """
    try:
        require_room()
    except StorageFullError as error:
        raise StorageFullError(
            f"{error.problem} While the training moves from {predecessor.num_ranks} to {dist.get_world_size(group)} "
            "processes, its state is there twice.",
            f"{_by_checkpoint(predecessor.num_ranks)}, or free space there.",
        ) from error
    carry_out(plan, settings, group)
    if plan.replaced is not None and dist.get_rank(group) == 0:
        _log.warning(
            "The training that was interrupted after step %d, in the job %r, was deleted: the one to resume was moved "
            "there, to go on with another number of processes.",
            plan.replaced,
            plan.job,
        )
    if dist.get_rank(group) == 0:
        _log.info(
            "The training was interrupted after step %d on %d processes. It goes on with %d.",
            predecessor.record.step,
            predecessor.num_ranks,
            dist.get_world_size(group),
        )


def fill_successor(
    predecessor: Predecessor,
    settings: OffloadSettings,
    layout: PartitionLayout,
    state: StateAccess,
    store: StateStore,
    group: ProcessGroup | None,
) -> None:
    """Fill this rank's new store from the stores of a training that was archived. Collective.

    Args:
        predecessor: The training.
        settings: Folders and transfer settings.
        layout: This rank's partition.
        state: Access to the new store, which has no generation yet.
        store: The new store.
        group: Process group of all ranks.

    Raises:
        StorageError: State cannot be read or written; raised on every rank.
    """
    sources = _Sources(predecessor, job=f"{settings.transfer.job}{ARCHIVE}", io_timeout=settings.transfer.io_timeout)
    rank, nbytes = dist.get_rank(group), _FP32_BYTES * layout.numel * layout.extents.num_arrays
    steps = np.zeros(len(layout.parameters), np.int64)
    with sources.opened, show_on_rank_zero("Moving the optimizer state to other processes", nbytes) as advance:
        with raising_together(group):
            updates = sources.of(0).steps
            steps = np.array([updates[parameter.name] for parameter in layout.parameters], np.int64)

        def fill(window: Window) -> None:
            for array in window.arrays:
                array.fill(0)  # zeroes the padding
            for parameter, begin, end in layout.real_ranges_between(window.begin, window.end):
                arrays = [array[begin - window.begin : end - window.begin] for array in window.arrays]
                sources.read(parameter.name, rank * parameter.numel + begin - parameter.offset, arrays)
            advance(sum(array.nbytes for array in window.arrays))

        state.replace(fill, steps=steps, together=partial(raising_together, group))
    record = predecessor.record
    with raising_together(group):
        # Without the residual of compressed gradients, which belongs to the old partitions.
        store.record_training(
            generation=store.generation,
            step=record.step,
            content=record.content,
            has_steps=True,
            version=record.version,
        )


class _Sources:
    """The old stores; each is opened on its first use.

    Args:
        predecessor: The training.
        job: The job that holds its parts.
        io_timeout: ``TransferConfig.io_timeout``.

    Attributes:
        opened: Context that closes the stores.
    """

    def __init__(self, predecessor: Predecessor, *, job: str, io_timeout: float) -> None:
        self.opened = ExitStack()
        self._predecessor, self._job, self._io_timeout = predecessor, job, io_timeout
        self._states: dict[int, StoredState] = {}

    def of(self, rank: int) -> StoredState:
        """Return the state of an old rank; raises the errors of :class:`StoredState`."""
        if rank not in self._states:
            folders = self._predecessor.folders[rank]
            state = StoredState(
                [rank_folder_path(folder, job=self._job, rank=rank) for folder in folders],
                rank=rank,
                generation=self._predecessor.record.generation,
                io_timeout=self._io_timeout,
            )
            self.opened.callback(state.close)
            self._states[rank] = state
        return self._states[rank]

    def read(self, name: str, begin: int, arrays: Sequence[NDArray[np.float32]]) -> None:
        """Read a range of a parameter's elements from every array; see :meth:`StoredState.read`.

        Args:
            name: Name of the parameter.
            begin: Index of the first element in the whole, flattened parameter.
            arrays: Arrays to fill.
        """
        numel, done = self.of(0).slices[name].numel, 0  # with padding, the same on all old ranks
        while done < len(arrays[0]):
            rank, skipped = divmod(begin + done, numel)
            parts = [array[done : done + numel - skipped] for array in arrays]
            state = self.of(rank)
            state.read(state.slices[name].offset + skipped, parts)
            done += len(parts[0])
