"""Finds the newest generation that an earlier process left complete, by the trailer at the end of every extent."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import ConfigError, StorageCorruptError, StorageError
from lightning_smartinfinity.native import TRAILER_BYTES
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage.extents import ExtentMap
from lightning_smartinfinity.storage.folders.manifest import Manifest, read_manifest
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME, STATE_NAME
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.residual_file import damaged_parts, was_cut_short
from lightning_smartinfinity.storage.records.training_record import (
    TrainingRecord,
    damaged_training_records,
    read_training_records,
    residual_of,
)
from lightning_smartinfinity.storage.state.commit_record import CommitRecord, Records, erase_record, read_records
from lightning_smartinfinity.storage.state.lost_parts import FoundPart, right_folders

__all__ = [
    "UsableRecords",
    "committed_records",
    "common_manifest",
    "complete_generations",
    "contradiction",
    "damaged_beside",
    "damaged_records",
    "first_mismatch",
    "has_steps",
    "lost_residual",
    "newest_complete",
    "records_of",
    "require_recoverable",
    "usable_records",
    "with_whole_residuals",
    "written_records",
]


def first_mismatch(
    folders: Sequence[OpenFolder], extents: ExtentMap, record: CommitRecord, identity: native.Identity
) -> str | None:
    """Compare the trailer of every extent that a record names with the expected one.

    Args:
        folders: The rank's folder of each device.
        extents: The extents of the tasklets.
        record: The generation to verify.
        identity: The identity that every extent carries.

    Returns:
        A sentence about the first extent that does not match, with its path and offset; None if all match.

    Raises:
        StorageError: A file cannot be read.
    """
    problems = (_mismatch_in_file(folder, device, extents, record, identity) for device, folder in enumerate(folders))
    return next((problem for problem in problems if problem is not None), None)


def _mismatch_in_file(
    folder: OpenFolder, device: int, extents: ExtentMap, record: CommitRecord, identity: native.Identity
) -> str | None:
    path = folder.path / STATE_NAME
    with storage_errors("Reading", path), folder.reader(STATE_NAME) as file:
        size = os.fstat(file.fileno()).st_size
        for tasklet, extent in enumerate(extents.extents):
            if record.placement.devices[tasklet] != device:
                continue
            generation = int(record.tasklet_generations[tasklet])
            place = extents.place_offset(int(record.placement.positions[tasklet]))
            offset = place + extent.nbytes - TRAILER_BYTES
            # A damaged position may exceed the largest offset of a system call.
            trailer = os.pread(file.fileno(), TRAILER_BYTES, offset) if offset < size else b""
            if not native.is_trailer_of(
                trailer,
                identity,
                index=tasklet,
                generation=generation,
                numel=extent.numel,
                num_arrays=extents.num_arrays,
                extent_bytes=extent.nbytes,
            ):
                return (
                    f"{str(path)!r} does not hold generation {generation} of tasklet {tasklet} "
                    f"(trailer at offset {offset})."
                )
    return None


def common_manifest(folders: Sequence[OpenFolder], *, rank: int) -> Manifest:
    """Return the first manifest of a rank's folders; the others must agree with it and with the folders' order.

    Raises:
        StorageError: The folders belong to different stores, hold copies, are in another order, or some are missing.
        StorageCorruptError: A manifest is damaged.
    """
    manifests = [read_manifest(folder) for folder in folders]
    first = manifests[0]
    parts = [
        FoundPart(folder.path.parents[1], folder.path.parent.name, manifest, None)
        for folder, manifest in zip(folders, manifests, strict=True)
        if (manifest.job, manifest.rank) == (first.job, first.rank)
    ]
    for device, (folder, manifest) in enumerate(zip(folders, manifests, strict=True)):
        if (manifest.job, manifest.rank, manifest.device) != (first.job, rank, device):
            same = [part.storage for part in parts if part.manifest.device == manifest.device]
            what = "belongs to another store, or the storage folders are in another order"
            if manifest.job == first.job and len(same) > 1:
                what = f"is the same part of the state as the one in {str(same[0])!r}: one of them is a copy"
            raise StorageError(
                f"{str(folder.path)!r} {what}.",
                f"Name the storage folders of the state, in the order of its parts: {right_folders(parts)}.",
            )
    if first.extents.num_devices != len(folders):
        raise StorageError(
            f"The optimizer state in {str(folders[0].path)!r} is in {first.extents.num_devices} storage folders;"
            f" {len(folders)} named.",
            f"Name those that have it, in this order: {right_folders(parts)}.",
        )
    return first


def require_recoverable(folder: Path, manifest: Manifest, *, state_format: str | None) -> None:
    """Check that a store has the wanted format, and that all of its state is on storage.

    Args:
        folder: The rank's folder, for messages.
        manifest: The store's manifest.
        state_format: The required format; None means any.

    Raises:
        ConfigError: The store has another state format.
        StorageError: Some of the state was in the process's memory only.
    """
    if state_format is not None and manifest.state_format != state_format:
        raise ConfigError(
            f"The optimizer state in {str(folder)!r} is in the format {manifest.state_format!r},"
            f" state_format={state_format!r} was asked for.",
            f"Use state_format={manifest.state_format!r}, or convert it with `smart-infinity convert`.",
        )
    if manifest.extents.num_in_memory:
        raise StorageError(
            f"Of the optimizer state in {str(folder)!r} {manifest.extents.num_in_memory} tasklets were in the memory of"
            " the process that made it.",
            "Resume from a checkpoint; with TransferConfig(durability='step') or keep=True all of it is on storage.",
        )


def records_of(folder: OpenFolder, manifest: Manifest) -> Records:
    """Read the commit records of a store from its first folder. Raises as :func:`read_records`."""
    read = partial(
        read_records,
        folder,
        num_tasklets=manifest.extents.num_tasklets,
        num_parameters=len(manifest.description.parameters),
        job=manifest.job,
    )
    found = read()
    if [record.generation for record in found.intact] != [0]:
        return found
    recorded: list[TrainingRecord] = []
    with suppress(StorageError):  # what resumes from the training records raises this error
        recorded = read_training_records(folder, identity=manifest.identity)
    # Before a training record of generation 2 or later, both halves are written to, also at an interval.
    return read(were_written=any(record.generation > 1 for record in recorded))


def complete_generations(folders: Sequence[OpenFolder], manifest: Manifest) -> list[int]:
    """Return the numbers of the generations whose record and extents are all intact, newest first.

    Raises:
        StorageError: A file cannot be read.
    """
    records, _ = records_of(folders[0], manifest)
    return [record.generation for record in records if _mismatch(folders, manifest, record) is None]


def written_records(folder: OpenFolder, manifest: Manifest) -> list[TrainingRecord]:
    """Return the intact training records, newest first, without those whose residual was not completely written.

    The values of the residuals are not read.

    Raises:
        StorageError: A file cannot be read.
    """
    found = []
    for record in read_training_records(folder, identity=manifest.identity):
        residual = residual_of(record, manifest.identity)
        if residual is None or not was_cut_short(folder, residual):
            found.append(record)
    return found


def committed_records(folder: OpenFolder, manifest: Manifest) -> list[TrainingRecord]:
    """Return the :func:`written_records` whose generation is committed, newest first. Raises as that function."""
    committed = {record.generation for record in records_of(folder, manifest).intact}
    return [record for record in written_records(folder, manifest) if record.generation in committed]


def lost_residual(folder: OpenFolder, manifest: Manifest) -> str | None:
    """Return a sentence about a residual without which no record of a step is left; None if there is no such one.

    A kill within its write leaves the record before, whose residual is whole and whose generation is not overwritten,
    unless it is the first record.

    Args:
        folder: The rank's first folder.
        manifest: The store's manifest.

    Raises:
        StorageError: A file cannot be read.
    """
    committed = {record.generation for record in records_of(folder, manifest).intact}
    records = read_training_records(folder, identity=manifest.identity)
    lost = next((record for record in records if record.number > 1 and record.generation in committed), None)
    residual = None if lost is None else residual_of(lost, manifest.identity)
    if lost is None or residual is None or committed_records(folder, manifest):
        return None
    path = str(folder.path / residual.name)
    return f"{path!r} does not hold the residual of step {lost.step}, and no other step is left to resume from."


class UsableRecords(NamedTuple):
    """The training records that a training may resume from.

    Attributes:
        records: The records whose generation is complete, newest first. Residuals were not read.
        problem: Why there is none although the training has written some; None if there is one, or nothing was written.
        damage: A sentence about a newer generation that is committed but damaged, so that its record is left out.
    """

    records: list[TrainingRecord]
    problem: StorageError | None
    damage: str | None


def usable_records(folders: Sequence[OpenFolder], manifest: Manifest) -> UsableRecords:
    """Look for the training records that a training may resume from.

    Raises:
        StorageError: A file cannot be read, or has a format version that is not read.
    """
    records = written_records(folders[0], manifest)
    complete = complete_generations(folders, manifest)
    usable = [record for record in records if record.generation in complete]
    problem = None if usable else _why_not(folders, manifest, records, oldest=min(complete, default=0))
    newer = [record for record in records if usable and record.number > usable[0].number]
    return UsableRecords(usable, problem, _damaged_generation(folders, manifest, newer))


def damaged_beside(
    folder: OpenFolder,
    manifest: Manifest,
    usable: Sequence[TrainingRecord],
    *,
    common: Collection[int] | None = None,
) -> list[str]:
    """Return a sentence about each training record that is damaged, while a training can resume from others.

    Args:
        folder: The rank's first folder.
        manifest: The store's manifest.
        usable: The records to resume from, newest first.
        common: Numbers of the records that all ranks have; None if they are unknown.

    Raises:
        StorageError: A file cannot be read.
    """
    if not usable:
        return []
    step = next((record.step for record in usable if common is None or record.number in common), None)
    goes_on = "" if step is None else f" A training that resumes goes on from step {step}."
    return [
        f"{_condition(folder, [name])}, or a kill cut its write off.{goes_on}"
        for name in damaged_records(folder, manifest)
    ]


def _condition(folder: OpenFolder, names: Sequence[str]) -> str:
    """Return the beginning of a sentence about training records that are damaged or missing."""
    named = " and ".join(repr(str(folder.path / name)) for name in names)
    how = "missing" if not any(map(folder.status, names)) else "damaged"
    return f"The training record{'s' if names[1:] else ''} {named} {'are' if names[1:] else 'is'} {how}"


def damaged_records(folder: OpenFolder, manifest: Manifest) -> list[str]:
    """Return the names of a store's training records that are damaged, or were lost, as by a power loss.

    Raises:
        StorageError: A file cannot be read.
    """
    committed = [record.generation for record in records_of(folder, manifest).intact]
    return damaged_training_records(
        folder, identity=manifest.identity, has_steps=has_steps(folder, manifest), committed=committed
    )


def has_steps(folder: OpenFolder, manifest: Manifest) -> bool:
    """Return whether a store's commit records show, or may have shown, a step. Raises as :func:`records_of`."""
    intact, problem = records_of(folder, manifest)
    return problem is not None or any(record.generation > 0 for record in intact)


def _why_not(
    folders: Sequence[OpenFolder], manifest: Manifest, records: Sequence[TrainingRecord], *, oldest: int
) -> StorageError | None:
    """Return why a training cannot be resumed from any of its records; None if it has written none.

    Args:
        folders: The rank's folders.
        manifest: The store's manifest.
        records: The intact records, newest first.
        oldest: The oldest complete generation.

    Returns:
        A StorageCorruptError if a record or its state is damaged. A StorageError if the training wrote no more records,
        or several generations followed the last record.
    """
    folder = folders[0]
    ended = next((record for record in records if record.end is not None), None)
    if ended is not None:
        return StorageError(
            f"The training in {str(folder.path)!r} wrote no training records after step {ended.step}: {ended.end}",
            user_calls().begin_anew,
        )
    damaged = damaged_records(folder, manifest)
    if damaged:
        other = "".join(_why_not_other(record, oldest=oldest) for record in records)
        return StorageCorruptError(f"{_condition(folder, damaged)}{other}.", user_calls().begin_anew)
    if (lost := lost_residual(folder, manifest)) is not None:
        return StorageCorruptError(lost, user_calls().begin_anew)
    if records and records[0].generation < oldest:
        return StorageError(
            f"The training in {str(folder.path)!r} ended after several generations that came after its last record "
            f"(step {records[0].step}): several optimizer steps in a batch, or writes to its parameters. They have "
            "overwritten its state.",
            user_calls().begin_anew,
        )
    problem = _damaged_state(folders, manifest, records)
    return None if problem is None else StorageCorruptError(problem, user_calls().begin_anew)


def _why_not_other(record: TrainingRecord, *, oldest: int) -> str:
    late, early = "later steps have overwritten the state of the one before", "the state of the other one is incomplete"
    return f", and {late if record.generation < oldest else early} (step {record.step})"


def _damaged_state(folders: Sequence[OpenFolder], manifest: Manifest, records: Sequence[TrainingRecord]) -> str | None:
    """Return a sentence about damage to the state that training records belong to, or to its commit record, or None."""
    torn = records_of(folders[0], manifest).problem if records else None
    return _damaged_generation(folders, manifest, records) or torn


def _damaged_generation(
    folders: Sequence[OpenFolder], manifest: Manifest, records: Sequence[TrainingRecord]
) -> str | None:
    """Return a sentence about damage to a committed generation that training records belong to, or None."""
    recorded = {record.generation for record in records}
    committed = (each for each in records_of(folders[0], manifest).intact if each.generation in recorded)
    return next(filter(None, (_mismatch(folders, manifest, each) for each in committed)), None)


def with_whole_residuals(
    folder: OpenFolder, manifest: Manifest, records: Sequence[TrainingRecord]
) -> list[TrainingRecord]:
    """Read the residuals of training records, and return the records whose residual is whole, or that have none.

    Raises:
        StorageCorruptError: There is no such record, and a residual is damaged.
        StorageError: A file cannot be read.
    """
    problems = []
    for record in records:
        residual = residual_of(record, manifest.identity)
        problems.append(None if residual is None else next(damaged_parts(folder, residual), None))
    whole = [record for record, problem in zip(records, problems, strict=True) if problem is None]
    damaged = [problem for problem in problems if problem is not None]
    if damaged and not whole:
        raise StorageCorruptError(damaged[0], user_calls().begin_anew)
    if damaged:
        warnings.warn(f"{damaged[0]} Going on from step {whole[0].step}.", stacklevel=3)
    return whole


def newest_complete(folders: Sequence[OpenFolder], manifest: Manifest, newest: int | None) -> CommitRecord:
    """Return the newest record, up to ``newest``, whose extents are all intact; newer records are erased.

    Later steps overwrite the newer records' places, so that these records would name a mixture of generations. A torn
    or damaged record is erased, too: a later read could find it intact.

    Raises:
        StorageCorruptError: There is no such record.
        StorageError: A file cannot be read.
    """
    records, problem = records_of(folders[0], manifest)
    problems = [] if problem is None else [problem]
    for record in records:
        if newest is not None and record.generation > newest:
            continue
        mismatch = _mismatch(folders, manifest, record)
        if mismatch is None:
            if problems:
                warnings.warn(f"{problems[0]} Going on from generation {record.generation}.", stacklevel=3)
            if problem is not None or record is not records[0]:
                # The generation only selects the half: the one that does not hold this record.
                erase_record(folders[0], replace(record, generation=record.generation + 1), flush=True)
            return record
        problems.append(mismatch)
    raise StorageCorruptError(
        problems[0] if problems else f"{str(folders[0].path / COMMIT_NAME)!r} holds no commit record{_up_to(newest)}.",
        "Resume from a checkpoint with a new store: remove the folder or choose another TransferConfig(job=...).",
    )


def contradiction(folders: Sequence[OpenFolder], record: CommitRecord) -> str | None:
    """Return a sentence about a record that no store can have written, although its checksum is right, or None."""
    generations = record.tasklet_generations
    if (
        np.any((generations < 0) | (generations > record.generation))
        or np.any(record.placement.devices >= len(folders))
        or np.any(record.steps < 0)
    ):
        path = folders[0].path / COMMIT_NAME
        return f"{str(path)!r}: the record of generation {record.generation} contradicts itself."
    return None


def _mismatch(folders: Sequence[OpenFolder], manifest: Manifest, record: CommitRecord) -> str | None:
    problem = contradiction(folders, record)
    return problem or first_mismatch(folders, manifest.extents, record, manifest.identity)


def _up_to(newest: int | None) -> str:
    return "" if newest is None else f" up to generation {newest}"
