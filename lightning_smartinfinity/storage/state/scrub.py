"""Verifies all that a resume reads: every extent of a store's newest generation, training records and residuals."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import Advance, Show
from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.settings import IO_TIMEOUT
from lightning_smartinfinity.storage.folders.direct import open_state_file
from lightning_smartinfinity.storage.folders.manifest import Manifest, read_manifest
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME, STATE_NAME, read_rank_folder
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.io.os_errors import failure_error, in_milliseconds
from lightning_smartinfinity.storage.records.residual_file import ResidualOf, damaged_parts
from lightning_smartinfinity.storage.records.training_record import TrainingRecord, record_name, residual_of
from lightning_smartinfinity.storage.state.commit_record import CommitRecord
from lightning_smartinfinity.storage.state.parts import require_files
from lightning_smartinfinity.storage.state.recovery import (
    common_manifest,
    contradiction,
    damaged_beside,
    records_of,
    usable_records,
)

__all__ = ["ScrubbedRank", "scrub_rank"]

_BATCH = 64  # tasklets that are read at a time
_NUM_BUFFERS = 4


@dataclass(frozen=True, kw_only=True)
class ScrubbedRank:
    """Result of reading a rank's state: how much was read, and what is damaged.

    Args:
        folders: The rank's folders.
        generation: The generation that was read; None if there is none.
        num_extents: Number of its extents.
        num_bytes: Bytes of all that was read, with an older generation and the residuals of compressed gradients.
        damaged: A sentence about each damage, with its path, and its offset if it is known.
        unknown: Sentences that explain why some or all of the state could not be read.
    """

    folders: tuple[Path, ...]
    generation: int | None = None
    num_extents: int = 0
    num_bytes: int = 0
    damaged: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def scrub_rank(
    folders: Sequence[Path],
    *,
    rank: int,
    show: Show,
    check: Callable[[TrainingRecord], object] = bool,
    common: Collection[int] | None = None,
) -> ScrubbedRank:
    """Read all of a rank's newest generation, with direct I/O where possible, and its training records.

    If a training would resume from an older generation, that is read, too. Nothing there changes.

    Args:
        folders: The rank's folder in every storage folder, in any order.
        rank: Number of the rank.
        show: Shows the progress.
        check: Called with each training record that a resume may use; raises StorageCorruptError if its content cannot
            be read.
        common: Numbers of the training records that all ranks have; None if they are unknown.

    Raises:
        StorageLockedError: A process uses one of the folders.
        StorageError: A folder is missing or not this user's, or cannot be opened.
    """
    with ExitStack() as opened:
        try:
            claimed, manifest, record, torn = limited("Opening", folders[0], _opened, folders, rank, opened)
        except StorageCorruptError as error:
            return ScrubbedRank(folders=tuple(folders), damaged=(error.problem,))
        on_storage = range(manifest.extents.num_in_memory, manifest.extents.num_tasklets)
        num_bytes = _bytes_of(manifest, on_storage)
        damaged, unknown = [], [] if torn is None else [f"{torn} Generation {record.generation} was read."]
        try:
            training = limited("Reading", claimed[0].path, _training_of, claimed, manifest, check, common)
            damaged += training.damaged
            unknown += training.unknown
            older = _older(claimed[0], manifest, record, training.generation)
            others = [] if older is None else [index for index in on_storage if _is_elsewhere(index, older, record)]
            num_bytes += _bytes_of(manifest, others) + sum(residual.nbytes for residual in training.residuals)
            with show(f"Reading the state of rank {rank}", num_bytes) as advance:
                for generation, tasklets in ((record, on_storage), (older, others)):
                    if generation is not None:
                        for sentence in _damaged(claimed, manifest, generation, tasklets, advance):
                            damaged.append(sentence)
                for residual in training.residuals:
                    path = claimed[0].path / residual.name
                    damaged += limited("Reading", path, _damaged_residual, claimed[0], residual, advance)
        except StorageError as error:  # report what was found before
            unknown.append(str(error))
        return ScrubbedRank(
            folders=tuple(folder.path for folder in claimed),
            generation=record.generation,
            num_extents=len(on_storage),
            num_bytes=num_bytes,
            damaged=tuple(damaged),
            unknown=tuple(unknown),
        )


def _older(folder: OpenFolder, manifest: Manifest, newest: CommitRecord, generation: int | None) -> CommitRecord | None:
    """Return the record of a generation, unless it is the newest."""
    records, _ = records_of(folder, manifest)
    older = (record for record in records if record.generation == generation != newest.generation)
    return next(older, None)


def _is_elsewhere(index: int, older: CommitRecord, newest: CommitRecord) -> bool:
    """Return whether a tasklet has a place of its own in the older generation."""
    return bool(older.tasklet_generations[index] != newest.tasklet_generations[index])


def _bytes_of(manifest: Manifest, tasklets: Sequence[int]) -> int:
    return sum(manifest.extents.extents[index].nbytes for index in tasklets)


class _Training(NamedTuple):
    """Problems found in the training records.

    Attributes:
        damaged: As of a :class:`ScrubbedRank`.
        unknown: As of a :class:`ScrubbedRank`.
        residuals: The residuals that belong to the records.
        generation: The generation that a training resumes from; None if there is none.
    """

    damaged: list[str]
    unknown: list[str]
    residuals: list[ResidualOf]
    generation: int | None = None


def _training_of(
    folders: Sequence[OpenFolder],
    manifest: Manifest,
    check: Callable[[TrainingRecord], object],
    common: Collection[int] | None,
) -> _Training:
    """Read the training records as a resume does, without their residuals."""
    found = _Training([], [], [])
    try:
        usable, problem, _ = usable_records(folders, manifest)  # the newest generation is read in any case
    except StorageError as error:
        found.unknown.append(str(error))
        return found
    if isinstance(problem, StorageCorruptError):  # other problems are no damage
        found.damaged.append(str(problem))
    found.unknown.extend(damaged_beside(folders[0], manifest, usable, common=common))
    for record in usable:
        try:
            check(record)
        except StorageCorruptError as error:
            found.damaged.append(f"{str(folders[0].path / record_name(record.number))!r}: {error}")
        residual = residual_of(record, manifest.identity)
        found.residuals.extend([] if residual is None else [residual])
    taken = (record.generation for record in usable if common is None or record.number in common)
    return found._replace(generation=next(taken, None))


def _opened(
    paths: Sequence[Path], rank: int, opened: ExitStack
) -> tuple[list[OpenFolder], Manifest, CommitRecord, str | None]:
    """Return a rank's folders in their order, its manifest, and what :func:`_newest` finds."""
    claimed = [opened.enter_context(read_rank_folder(path)) for path in paths]
    for folder in claimed:
        require_files(folder)
    claimed.sort(key=lambda folder: read_manifest(folder).device)
    manifest = common_manifest(claimed, rank=rank)
    return claimed, manifest, *_newest(claimed, manifest)


def _newest(folders: Sequence[OpenFolder], manifest: Manifest) -> tuple[CommitRecord, str | None]:
    """Return the newest record, and the problem of the other half (:class:`Records`), or None."""
    records, torn = records_of(folders[0], manifest)
    problem = contradiction(folders, records[0]) if records else torn
    if not records or problem is not None:
        path = folders[0].path / COMMIT_NAME
        raise StorageCorruptError(problem or f"{str(path)!r} holds no commit record.", "Resume from a checkpoint.")
    return records[0], torn


def _damaged(
    folders: Sequence[OpenFolder], manifest: Manifest, record: CommitRecord, tasklets: Sequence[int], advance: Advance
) -> Iterator[str]:
    with ExitStack() as opened:
        files = []
        for folder in folders:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nothing of this depends on direct I/O
                files.append(open_state_file(folder, STATE_NAME, "auto", access=os.O_RDONLY))
            opened.callback(files[-1].close)
        if not tasklets:
            return
        pipeline = native.Pipeline(
            files=files,
            identity=manifest.identity,
            num_buffers=_NUM_BUFFERS,
            buffer_bytes=manifest.extents.place_bytes,
            timeout_ms=in_milliseconds(IO_TIMEOUT),
        )
        opened.callback(pipeline.close)
        for begin in range(0, len(tasklets), _BATCH):
            some = tasklets[begin : begin + _BATCH]
            if _failure(pipeline, manifest, record, some) is not None:
                # A batch ends with its first failure. Read its tasklets one by one to find all failures.
                each = (_failure(pipeline, manifest, record, [index]) for index in some)
                yield from (f"{failure.message}." for failure in each if failure is not None)
            advance(_bytes_of(manifest, some))


def _damaged_residual(folder: OpenFolder, residual: ResidualOf, advance: Advance) -> list[str]:
    return list(damaged_parts(folder, residual, advance=advance))


def _failure(
    pipeline: native.Pipeline, manifest: Manifest, record: CommitRecord, tasklets: Sequence[int]
) -> native.Failure | None:
    """Read tasklets, and return the first failure.

    Raises:
        StorageTimeoutError: The disk does not answer, which does not mean that the state is damaged.
    """
    reads = [_read_of(manifest, record, index) for index in tasklets]
    pipeline.submit(native.Batch(native.Operation.READ, reads, io_class=native.IoClass.BACKGROUND))
    failure = pipeline.finish()
    if failure is not None and failure.kind == "timeout":
        raise failure_error(failure, what="Optimizer state")
    return failure


def _read_of(manifest: Manifest, record: CommitRecord, index: int) -> native.Tasklet:
    extents = manifest.extents
    borders = extents.borders_of(index)
    return native.Tasklet(
        index=index,
        numel=extents.extents[index].numel,
        num_arrays=extents.num_arrays,
        extent_bytes=extents.extents[index].nbytes,
        read_file=int(record.placement.devices[index]),
        read_offset=extents.place_offset(int(record.placement.positions[index])),
        read_generation=int(record.tasklet_generations[index]),
        write_file=0,
        write_offset=0,
        write_generation=0,
        segments=[],  # verify every region, and return no values
        blocks=native.Blocks(list(borders)) if borders else None,
    )
