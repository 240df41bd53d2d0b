"""Finds the folders with parts of trainings, and the points from which each part can be resumed."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage.folders.lock import is_locked, read_notes
from lightning_smartinfinity.storage.folders.lock_content import ARCHIVED, KEPT, REMOVED, successor_in
from lightning_smartinfinity.storage.folders.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import (
    COMMIT_NAME,
    STATE_NAME,
    TRAINING_NAMES,
    open_rank_folder,
    owned_names,
    rank_folder_path,
)
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.training_record import damaged_training_records, read_training_records
from lightning_smartinfinity.storage.state.lost_parts import may_have_steps
from lightning_smartinfinity.storage.state.recovery import (
    committed_records,
    damaged_records,
    has_steps,
    lost_residual,
    records_of,
    written_records,
)

__all__ = ["Part", "ResumePoint", "find_parts", "first_manifest", "look_at", "points_of", "require_files"]

_OF_RANK = re.compile(r"rank-[0-9]{5,}")


class ResumePoint(NamedTuple):
    """A point at which a training can be resumed, if all of its ranks have it: fields of a ``TrainingRecord``."""

    number: int
    generation: int
    run: bytes
    step: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """The folder of one rank in one storage folder, as a process found it. Ranks gather it, so its values are plain.

    Args:
        machine: :func:`~lightning_smartinfinity.common.machine.machine_identity` of the process.
        path: Path of the folder.
        rank: Number of the rank.
        store: Job id of the store there; None if there is no readable manifest.
        world_size: Number of ranks of its training.
        num_machines: Number of machines that its ranks ran on; 0 if it is unknown.
        device: Index of the storage folder among those of the rank.
        folders: Storage folders of the rank.
        kept: Whether the store is marked ``keep``.
        is_archived: Whether it was archived, and no training has been resumed from it since.
        successor: Job id of the stores for another number of ranks that are filled from it, or None.
        points: Points at which the rank can be resumed according to its records; only in its first folder.
        is_damaged: Whether a damaged or missing manifest or record may hide steps that no point shows.
        num_bytes: Bytes allocated by its files.
        in_use: Whether a process had locked it.
    """

    machine: str
    path: Path
    rank: int
    store: bytes | None = None
    world_size: int = 0
    num_machines: int = 0
    device: int = 0
    folders: tuple[str, ...] = ()
    kept: bool = False
    is_archived: bool = False
    successor: bytes | None = None
    points: frozenset[ResumePoint] = frozenset()
    is_damaged: bool = False
    num_bytes: int = field(default=0, compare=False)  # blocks may be allocated late
    in_use: bool = field(default=False, compare=False)

    @property
    def storage(self) -> Path:
        """The storage folder."""
        return self.path.parents[1]

    @property
    def job(self) -> str:
        """The job's name."""
        return self.path.parent.name


def find_parts(folders: Sequence[Path], jobs: Sequence[str]) -> list[Part]:
    """Return the parts of these jobs in storage folders, and in the storage folders that their manifests name.

    Nothing there changes. Storage folders that do not exist are skipped. Of several copies of a part, only the first
    one found counts: the manifests of a copy name the folders of the original.

    Raises:
        StorageError: A folder is not trusted, a file cannot be read, or a newer version wrote it.
    """
    found: list[Part] = []
    pending = [Path(os.path.abspath(folder)) for folder in folders]
    seen: set[tuple[int, int] | None] = {None}
    known: set[tuple[bytes, int, int, str]] = set()
    while pending:
        storage = pending.pop(0)
        identity = _identity_of(storage)
        if identity not in seen:
            seen.add(identity)
            parts = [part for job in jobs for part in _parts_of(storage / job)]
            pending += [Path(folder) for part in parts for folder in part.folders]
            for part in parts:
                key = None if part.store is None else (part.store, part.rank, part.device, part.job)
                if key is None or key not in known:
                    found.append(part)
                if key is not None:
                    known.add(key)
    return found


def _identity_of(storage: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(storage)
        return status.st_dev, status.st_ino
    return None


def _parts_of(job: Path) -> Iterator[Part]:
    names: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # making a store there raises the last
        names = sorted(filter(_OF_RANK.fullmatch, os.listdir(job)))
    for name in names:
        with (
            storage_errors("Reading", job / name),
            suppress(FileNotFoundError),  # its process has just removed it
            closing(open_rank_folder(job / name)) as folder,
        ):
            yield look_at(folder)


def first_manifest(storage: Path, *, job: str, rank: int) -> Manifest | None:
    """Return the manifest of a rank's store in a job, if it can be read, else None: opening the store raises why not.

    Args:
        storage: The first storage folder of the rank.
        job: The job.
        rank: The rank.
    """
    with (
        suppress(OSError, StorageError),
        closing(open_rank_folder(rank_folder_path(storage, job=job, rank=rank))) as folder,
    ):
        return read_manifest(folder)
    return None


def look_at(folder: OpenFolder) -> Part:
    """Return the part in a rank's folder. Raises as :func:`find_parts`."""
    notes = read_notes(folder)
    manifest: Manifest | None = None
    try:
        manifest = None if folder.status(MANIFEST_NAME) is None else read_manifest(folder)
        is_damaged = _lost_file(folder) is not None or (manifest is not None and _has_damaged_records(folder, manifest))
    except StorageCorruptError:
        is_damaged = MANIFEST_NAME in notes  # if not, it is not a file of this package
    rank = int(folder.path.name.removeprefix("rank-"))
    sizes = map(folder.status, owned_names(folder, notes, manifest))
    bare = Part(
        machine=machine_identity(),
        path=folder.path,
        rank=rank,
        kept=KEPT in notes,
        is_archived=ARCHIVED in notes,
        successor=successor_in(notes),
        is_damaged=is_damaged,
        num_bytes=sum(status.st_blocks * 512 for status in sizes if status is not None),
        in_use=is_locked(folder),
    )
    if manifest is None:
        return bare
    if manifest.rank != rank:  # the folder was renamed
        return replace(bare, is_damaged=True)
    return Part(
        **{
            **vars(bare),
            "store": manifest.job,
            "world_size": manifest.world_size,
            "num_machines": manifest.num_machines,
            "device": manifest.device,
            "folders": manifest.folders,
            "kept": bare.kept or manifest.keep,
            "points": points_of(folder, manifest) if manifest.device == 0 else frozenset(),
        }
    )


def points_of(folder: OpenFolder, manifest: Manifest) -> frozenset[ResumePoint]:
    """Return the points in a rank's first folder whose generation is committed. Neither extents nor residuals are read.

    Raises:
        StorageError: A record cannot be read.
    """
    if folder.status(COMMIT_NAME) is None:  # killed while the store was being removed
        return frozenset()
    records = committed_records(folder, manifest)
    return frozenset(ResumePoint(record.number, record.generation, record.run, record.step) for record in records)


def _lost_file(folder: OpenFolder) -> str | None:
    """Return a sentence about the manifest, the commit record or the training records if they were lost, else None.

    Whatever removes a store notes that in the lock, and deletes the training records first. So where no removal is
    noted, a manifest or commit record that is missing was lost if training records were made there, and so were
    training records that were made. A file without any commit record, as a power loss may leave it, has lost it, too.

    Raises:
        StorageError: As for :func:`find_parts`.
    """
    notes = read_notes(folder)
    if not may_have_steps(folder, notes):
        return None
    manifest = None if folder.status(MANIFEST_NAME) is None else read_manifest(folder)
    if manifest is not None and manifest.device != 0:
        path = str(folder.path / MANIFEST_NAME)
        return f"{path!r} is that of another storage folder: there are training records beside it."
    for name in (MANIFEST_NAME, COMMIT_NAME):
        if folder.status(name) is None:
            return f"{str(folder.path / name)!r} is missing, although there were training records beside it."
    assert manifest is not None
    lost = _lost_records(folder, manifest, notes)
    if lost is not None or records_of(folder, manifest) != ([], None) or not _has_written_steps(folder):
        return lost
    path = str(folder.path / COMMIT_NAME)
    return f"{path!r} holds no commit record, although there are training records of steps beside it."


def _has_written_steps(folder: OpenFolder) -> bool:
    """Return whether there are training records of steps, or damaged ones. Raises as :func:`find_parts`."""
    records = read_training_records(folder, identity=None)
    return any(record.has_steps for record in records) or bool(damaged_training_records(folder, identity=None))


def _lost_records(folder: OpenFolder, manifest: Manifest, notes: Collection[str]) -> str | None:
    files = [folder.status(name) for name in TRAINING_NAMES]
    made = set(TRAINING_NAMES).issubset(notes)
    if not made or all(files) or any(file is not None and file.st_size for file in files):
        return None
    paths = " and ".join(repr(str(folder.path / name)) for name in TRAINING_NAMES)
    are_missing = f"{paths} are missing or empty, although the training has taken steps."
    return are_missing if has_steps(folder, manifest) else None


def _lost_state(folder: OpenFolder) -> str | None:
    """Return a sentence about a state file that was lost, else None. Whatever removes a store deletes it last."""
    if folder.status(STATE_NAME) is not None or folder.status(MANIFEST_NAME) is None or REMOVED in read_notes(folder):
        return None
    return f"{str(folder.path / STATE_NAME)!r} is missing."


def require_files(folder: OpenFolder) -> None:
    """Check that no manifest, commit record, training records or state file were lost.

    Raises:
        StorageCorruptError: They were.
        StorageError: As for :func:`find_parts`.
    """
    problem = _lost_file(folder) or _lost_state(folder)
    if problem is not None:
        remedy = f"If there is a copy of that file, put it back. If not: {user_calls().begin_anew}"
        raise StorageCorruptError(problem, remedy)


def _has_damaged_records(folder: OpenFolder, manifest: Manifest) -> bool:
    """Return whether damaged records in a rank's first folder may hide that a step was taken."""
    if manifest.device != 0 or folder.status(COMMIT_NAME) is None or REMOVED in read_notes(folder):
        return False
    if damaged_records(folder, manifest) or lost_residual(folder, manifest) is not None:
        return True
    is_torn = records_of(folder, manifest).problem is not None
    return is_torn and any(record.number > 0 for record in written_records(folder, manifest))
