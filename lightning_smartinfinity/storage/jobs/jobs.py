"""Lists the jobs whose state is in a storage folder."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.settings import JOB_NAME
from lightning_smartinfinity.settings.user_calls import UserCalls
from lightning_smartinfinity.storage.folders.lock import LOCK_NAME, MOST_BYTES, is_locked, read_lock
from lightning_smartinfinity.storage.folders.lock_content import KEPT, checkpoint_in
from lightning_smartinfinity.storage.folders.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder, Trust, not_followed, refuse_foreign
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME, open_rank_folder, rank_folder_path
from lightning_smartinfinity.storage.io.files import bounded
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.training_record import TrainingRecord
from lightning_smartinfinity.storage.state.lost_parts import (
    FoundPart,
    changed_places,
    found_everywhere,
    lost_parts,
    recorded_calls,
)
from lightning_smartinfinity.storage.state.parts import ResumePoint, points_of, require_files
from lightning_smartinfinity.storage.state.recovery import records_of

__all__ = [
    "UNKNOWN_RANK",
    "Job",
    "JobFolder",
    "absent_state",
    "common_points",
    "find_job",
    "find_jobs",
    "is_rank_folder",
    "records_apart",
    "with_lost_parts",
]

_RANK_FOLDER = re.compile(r"rank-([0-9]{5,})")
UNKNOWN_RANK = -1
"""The rank of a job's folder that cannot be listed."""

_MOST_NAMED = 8  # ranks in a message


@dataclass(frozen=True, kw_only=True)
class JobFolder:
    """Describes the folder of one rank of a job in one storage folder, or a job's folder that cannot be listed.

    Args:
        path: Path of the folder.
        rank: Number of the rank; ``UNKNOWN_RANK`` if this is a job's folder that cannot be listed, or a link to one.
        pid: Process that uses the folder or used it last, numbered in its own PID namespace; None if unknown.
        in_use: Whether that process still uses it.
        num_bytes: Bytes allocated on storage.
        written: Time of the last write, in seconds since the epoch; None if the folder or its lock cannot be read: then
            pid, use and size are unknown, too.
        generation: Newest committed generation, -1 before the first; None if the records are in another folder,
            unreadable or another user's.
        kept: Whether the state is to be kept (``TransferConfig.keep``).
        points: Points at which the rank can be resumed; none if ``generation`` is None.
        world_size: Number of ranks of the job, from the manifest; 0 if unknown.
        problem: Why the folder cannot be read, or None.
        damaged: Whether the problem is damage, and not a folder that is refused or belongs to another user.
        lost: Whether the problem is that the rank's state lacks the part in another storage folder.
        doubt: A sentence about a damaged lock that keeps no training from resuming, or None.
        places: A sentence about parts that have changed places, or None.
        part: What was found of the rank's state; None if there is none, or it is another user's.
    """

    path: Path
    rank: int
    pid: int | None = None
    in_use: bool = False
    num_bytes: int = 0
    written: float | None = None
    generation: int | None = None
    kept: bool = False
    points: frozenset[ResumePoint] = frozenset()
    world_size: int = 0
    problem: str | None = None
    damaged: bool = False
    lost: bool = False
    doubt: str | None = None
    places: str | None = None
    part: FoundPart | None = None

    @property
    def resumable_step(self) -> int | None:
        """Step after which this rank can resume, if the others can; None if it cannot."""
        return max(self.points).step if self.points else None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job in one storage folder.

    Args:
        storage: The storage folder.
        name: ``TransferConfig.job``.
        folders: Folders of all ranks, by name.
    """

    storage: Path
    name: str
    folders: tuple[JobFolder, ...]

    @property
    def pids(self) -> list[int]:
        """The processes that use the job's folders now."""
        return sorted({folder.pid for folder in self.folders if folder.in_use and folder.pid is not None})

    @property
    def in_use(self) -> bool:
        """Whether a process uses one of its folders now."""
        return any(folder.in_use for folder in self.folders)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on storage."""
        return sum(folder.num_bytes for folder in self.folders)

    @property
    def written(self) -> float | None:
        """Time of the last write, in seconds since the epoch; None if no folder can be read."""
        return max((folder.written for folder in self.folders if folder.written is not None), default=None)

    @property
    def looked_at(self) -> bool:
        """Whether ``in_use`` is known for all its folders."""
        return all(folder.written is not None for folder in self.folders)

    @property
    def generation(self) -> int | None:
        """Newest generation that all ranks have, -1 if none; None if this storage folder holds no record."""
        found = [folder.generation for folder in self.folders if folder.generation is not None]
        return min(found, default=None)

    @property
    def kept(self) -> bool:
        """Whether the state is to be kept."""
        return any(folder.kept for folder in self.folders)

    @property
    def resumable_step(self) -> int | None:
        """Step after which a training can resume from here; None if it cannot, or lacks the records of a rank."""
        common = common_points([self])
        return max(common).step if common and not (self.in_use or self.lost or self.damaged) else None

    @property
    def lost(self) -> bool:
        """Whether state of one of its ranks lacks the part in another storage folder."""
        return any(folder.lost for folder in self.folders)

    @property
    def damaged(self) -> bool:
        """Whether one of its folders is damaged."""
        return any(folder.damaged for folder in self.folders)

    @property
    def listed(self) -> bool:
        """Whether its folders could be listed, which another user's may not be."""
        return all(folder.rank != UNKNOWN_RANK for folder in self.folders)

    @property
    def problems(self) -> list[str]:
        """Why some of its folders cannot be read, and what else a user must know of them."""
        told = ((folder.problem, folder.doubt, folder.places) for folder in self.folders)
        return [sentence for sentences in told for sentence in sentences if sentence]


def common_points(jobs: Sequence[Job]) -> frozenset[ResumePoint] | None:
    """Return the points that all ranks of a job have; None if a rank's are unknown, or it has none before a step.

    Args:
        jobs: The job, in every storage folder.
    """
    records = [folder for job in jobs for folder in job.folders if folder.generation is not None]
    points = [folder.points for folder in records]
    complete = len(points) == max((folder.world_size for folder in records), default=0)
    return frozenset.intersection(*points) if points and complete and all(points) else None


def records_apart(jobs: Sequence[Job]) -> str | None:
    """Return a sentence about a job whose ranks have no training record in common, or None.

    Args:
        jobs: The job, in every storage folder.
    """
    if common_points(jobs) != frozenset() or any(job.in_use for job in jobs):
        return None
    where = ", ".join(str(job.storage / job.name) for job in jobs)
    return f"{where}: the ranks have no training record in common, so that no training can resume from them."


def is_rank_folder(path: Path) -> bool:
    """Return whether a path is named like a rank's folder."""
    return _RANK_FOLDER.fullmatch(path.name) is not None


@bounded("Looking for jobs in")
def find_jobs(storage: Path) -> list[Job]:
    """Return the jobs in a storage folder, sorted by name. Nothing there changes; folders of other names are skipped.

    A link to a job's folder is a job that cannot be listed.

    Raises:
        StorageError: The folder cannot be read.
        StorageTimeoutError: The disk does not answer.
    """
    with storage_errors("Looking for jobs in", storage):
        names = sorted(entry.name for entry in os.scandir(storage) if os.path.isdir(entry))
    jobs = (find_job(storage, name) for name in names if JOB_NAME.holds(name))
    return [job for job in jobs if job is not None]


def find_job(storage: Path, name: str) -> Job | None:
    """Return the job of this name in a storage folder, or None. The storage folder itself need not be readable."""
    folders = tuple(_folders_of(storage / name))
    return Job(storage=storage, name=name, folders=folders) if folders else None


@bounded("Looking for the other storage folders of")
def with_lost_parts(
    storage: Path, jobs: Sequence[Job], *, calls_of: Callable[[TrainingRecord], UserCalls | None]
) -> list[Job]:
    """Return the jobs. The folder of a rank that lacks a part gets a problem that names the part.

    A rank with a damaged or refused part in another storage folder cannot be resumed. If parts have changed places, all
    folders that hold them say so.

    Args:
        storage: A storage folder, for the error if the disk does not answer.
        jobs: The jobs in all storage folders that the user named.
        calls_of: Function that returns the calls of the entry point that wrote a record; None if it cannot be read.

    Raises:
        StorageTimeoutError: The disk does not answer.
    """
    stores: dict[tuple[str, bytes, int], dict[int, FoundPart]] = {}
    for part in (folder.part for job in jobs for folder in job.folders):
        if part is not None:
            stores.setdefault(_store_of(part), {}).setdefault(part.manifest.device, part)
    errors = {store: _lost_parts(list(parts.values()), calls_of) for store, parts in stores.items()}
    places = {store: changed_places(list(parts.values())) for store, parts in stores.items()}
    seen = {folder.path: folder for job in jobs for folder in job.folders}
    broken = {store for store, parts in stores.items() if _has_damage(list(parts.values()), seen)}

    def told(folder: JobFolder) -> JobFolder:
        if folder.part is None or folder.problem:
            return folder
        store = _store_of(folder.part)
        error = errors[store]
        if error is not None:
            return replace(folder, problem=f"{error.problem} {error.remedy}", lost=True)
        return replace(folder, places=places[store], points=frozenset() if store in broken else folder.points)

    return [replace(job, folders=tuple(map(told, job.folders))) for job in jobs]


def _lost_parts(parts: list[FoundPart], calls_of: Callable[[TrainingRecord], UserCalls | None]) -> StorageError | None:
    return lost_parts(parts, calls=lambda: recorded_calls(parts, calls_of))


def _has_damage(parts: Sequence[FoundPart], seen: Mapping[Path, JobFolder]) -> bool:
    """Return whether a part of a rank's state is damaged or refused, in whatever storage folder."""
    job, rank = parts[0].job, parts[0].manifest.rank
    paths = [rank_folder_path(storage, job=job, rank=rank) for storage in found_everywhere(parts).values()]
    return any((seen.get(path) or _looked_at(path, rank=rank)).problem is not None for path in paths)


def _store_of(part: FoundPart) -> tuple[str, bytes, int]:
    return part.job, part.manifest.job, part.manifest.rank


def absent_state(jobs: Sequence[Job]) -> str | None:
    """Return a sentence about the ranks of a job without state in any of its folders, or None if all have state.

    Args:
        jobs: The job, in every storage folder.
    """
    states = [folder for job in jobs for folder in job.folders if folder.rank != UNKNOWN_RANK]
    world_size = max((folder.world_size for folder in states), default=0)
    present = {folder.rank for folder in states if folder.rank < world_size}
    num_absent = world_size - len(present)  # may be billions by another user's manifest
    if num_absent == 0:
        return None
    absent = islice((rank for rank in range(world_size) if rank not in present), _MOST_NAMED)
    named = ", ".join(map(str, absent)) + (", ..." if num_absent > _MOST_NAMED else "")
    where = ", ".join(str(job.storage / job.name) for job in jobs)
    return f"{where}: the state of {num_absent} of {world_size} ranks ({named}) is missing, or on another machine."


def _folders_of(path: Path) -> Iterator[JobFolder]:
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if not path.is_symlink():
            yield JobFolder(path=path, rank=UNKNOWN_RANK, problem=_why_not_listed(path, error))
        return
    ranks = [found for name in names if (found := _RANK_FOLDER.fullmatch(name)) is not None]
    if ranks and path.is_symlink():
        yield JobFolder(path=path, rank=UNKNOWN_RANK, problem=str(not_followed(path.absolute())))
        return
    for found in ranks:
        yield _looked_at(path / found[0], rank=int(found[1]))


def _why_not_listed(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        try:
            refuse_foreign(path)
        except StorageError as foreign:
            return foreign.problem
    return f"Listing {str(path)!r}: {error.strerror}."


def _looked_at(path: Path, *, rank: int) -> JobFolder:
    try:
        with storage_errors("Reading", path), closing(open_rank_folder(path, trust=Trust.ANY)) as folder:
            pid, notes, damage = _lock_in(folder)
            files = [status for name in folder.names() if (status := _regular(folder, name)) is not None]
            seen = JobFolder(
                path=path,
                rank=rank,
                pid=pid,
                in_use=is_locked(folder),
                num_bytes=sum(status.st_blocks * 512 for status in files),
                written=max((status.st_mtime for status in files), default=os.fstat(folder.descriptor).st_mtime),
                kept=KEPT in notes,
            )
            with ExitStack() as opened:
                seen = _with_generation(seen, folder, notes, opened)
            return seen if damage is None else _with_damaged_lock(seen, folder, damage)
    except StorageError as error:
        return _failed(JobFolder(path=path, rank=rank), error)


def _lock_in(folder: OpenFolder) -> tuple[int | None, frozenset[str], StorageCorruptError | None]:
    try:
        return *read_lock(folder), None
    except StorageCorruptError as error:
        return None, frozenset(), error


def _with_damaged_lock(seen: JobFolder, folder: OpenFolder, damage: StorageCorruptError) -> JobFolder:
    status = folder.status(LOCK_NAME)
    is_large = status is not None and status.st_size >= MOST_BYTES
    if seen.part is None or seen.kept or is_large:  # no job may begin there
        return seen if seen.problem is not None else _failed(seen, damage)
    return replace(seen, doubt=f"{damage.problem} The next job there copies it, and begins it anew.")


def _failed(seen: JobFolder, error: StorageError) -> JobFolder:
    return replace(seen, problem=error.problem, damaged=isinstance(error, StorageCorruptError))


def _with_generation(seen: JobFolder, folder: OpenFolder, notes: Collection[str], opened: ExitStack) -> JobFolder:
    try:
        if not _is_foreign(folder):
            folder = opened.enter_context(closing(open_rank_folder(folder.path)))  # with the trust that a training has
            require_files(folder)
        if folder.status(MANIFEST_NAME) is None:
            return seen
        manifest = read_manifest(folder)
        seen = replace(seen, kept=seen.kept or manifest.keep, world_size=manifest.world_size)
        if not _is_foreign(folder):
            storage, job = folder.path.parents[1], folder.path.parent.name
            seen = replace(seen, part=FoundPart(storage, job, manifest, checkpoint_in(notes)))
        seen = replace(seen, generation=_generation(folder, manifest))
        return seen if seen.generation is None else replace(seen, points=points_of(folder, manifest))
    except StorageError as error:
        return _failed(seen, error)


def _generation(folder: OpenFolder, manifest: Manifest) -> int | None:
    # Another user's manifest may give records a size beyond this machine's memory.
    if _is_foreign(folder) or folder.status(COMMIT_NAME) is None:
        return None
    intact = records_of(folder, manifest).intact
    return intact[0].generation if intact else -1


def _is_foreign(folder: OpenFolder) -> bool:
    return os.fstat(folder.descriptor).st_uid != os.geteuid()


def _regular(folder: OpenFolder, name: str) -> os.stat_result | None:
    status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
    return status if stat.S_ISREG(status.st_mode) and name != LOCK_NAME else None
