"""Lists and removes the jobs whose state or parameters lie in a storage folder."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.store.folders import COMMIT_NAME, RankFolder, is_marked_kept, open_rank_folder
from lightning_smartinfinity.store.lock import LOCK_NAME, is_locked, read_lock
from lightning_smartinfinity.store.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_smartinfinity.store.open_folder import OpenFolder, Trust
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.record import read_records

__all__ = ["Job", "JobFolder", "find_jobs", "is_rank_folder", "remove_job"]

_RANK_FOLDER = re.compile(r"(rank|parameters)-(\d{5,})")


@dataclass(frozen=True, kw_only=True)
class JobFolder:
    """Describes the folder of one rank of a job in one storage folder.

    Args:
        path: Its folder.
        holds: ``"state"`` or ``"parameters"``.
        rank: Number of the rank.
        pid: Process that uses the folder, or used it last, as that process saw its number; None if unknown.
        in_use: Whether that process still uses it.
        num_bytes: Bytes allocated on storage.
        written: Time of the last write, in seconds since the epoch.
        generation: Newest committed generation, -1 before the first; None if the records are elsewhere or unreadable.
        kept: Whether the state is to be kept (``TransferConfig.keep``).
        problem: Why the folder cannot be read, or None.
    """

    path: Path
    holds: str
    rank: int
    pid: int | None = None
    in_use: bool = False
    num_bytes: int = 0
    written: float = 0.0
    generation: int | None = None
    kept: bool = False
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job in one storage folder.

    Args:
        storage: The storage folder.
        name: ``TransferConfig.job``.
        folders: Folders of all ranks, of state and of parameters, by name.
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
    def written(self) -> float:
        """Time of the last write, in seconds since the epoch."""
        return max(folder.written for folder in self.folders)

    @property
    def generation(self) -> int | None:
        """Newest generation that all ranks have, -1 if none; None if no record lies here."""
        found = [folder.generation for folder in self.folders if folder.generation is not None]
        return min(found, default=None)

    @property
    def kept(self) -> bool:
        """Whether the state is to be kept."""
        return any(folder.kept for folder in self.folders)

    @property
    def problems(self) -> list[str]:
        """Why some of its folders cannot be read."""
        return [folder.problem for folder in self.folders if folder.problem is not None]


def is_rank_folder(path: Path) -> bool:
    """Return whether a path is named like a rank's folder."""
    return _RANK_FOLDER.fullmatch(path.name) is not None


def find_jobs(storage: Path) -> list[Job]:
    """Return the jobs in a storage folder, by name. Nothing there changes.

    Raises:
        StorageError: The folder cannot be read.
    """
    with storage_errors("Looking for jobs in", storage):
        names = sorted(entry.name for entry in os.scandir(storage) if entry.is_dir(follow_symlinks=False))
    jobs = (Job(storage=storage, name=name, folders=tuple(_folders_of(storage / name))) for name in names)
    return [job for job in jobs if job.folders]


def remove_job(job: Job, *, kept: bool) -> list[Path]:
    """Delete a job that no process uses: all that this package made, in all of its folders here.

    Args:
        job: The job.
        kept: Whether to delete state that is to be kept, too.

    Returns:
        The folders that are left, because something else lies there.

    Raises:
        StorageLockedError: A process uses it. Nothing was deleted.
        StorageError: It is to be kept, or is not this user's. Nothing was deleted.
    """
    if job.kept and not kept:
        raise StorageError(
            f"The optimizer state of the job {job.name!r} in {str(job.storage)!r} is to be kept.",
            "To remove it all the same, pass --kept.",
        )
    with ExitStack() as locked:
        folders = []
        for folder in job.folders:
            folders.append(RankFolder(folder.path, create=False))
            locked.callback(folders[-1].discard)
        for owned in folders:
            owned.destroy()
    return [folder.path for folder in job.folders if folder.path.exists()]


def _folders_of(path: Path) -> Iterator[JobFolder]:
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return
    for name in names:
        found = _RANK_FOLDER.fullmatch(name)
        if found is not None:
            holds, rank = "state" if found[1] == "rank" else "parameters", int(found[2])
            yield _looked_at(path / name, holds=holds, rank=rank)


def _looked_at(path: Path, *, holds: str, rank: int) -> JobFolder:
    try:
        with storage_errors("Reading", path), closing(open_rank_folder(path, trust=Trust.ANY)) as folder:
            pid, notes = read_lock(folder)
            files = [status for name in folder.names() if (status := _regular(folder, name)) is not None]
            seen = JobFolder(
                path=path,
                holds=holds,
                rank=rank,
                pid=pid,
                in_use=is_locked(folder),
                num_bytes=sum(status.st_blocks * 512 for status in files),
                written=max((status.st_mtime for status in files), default=os.fstat(folder.descriptor).st_mtime),
                kept=is_marked_kept(notes),
            )
            return _with_generation(seen, folder)
    except StorageError as error:
        return JobFolder(path=path, holds=holds, rank=rank, problem=error.problem)


def _with_generation(seen: JobFolder, folder: OpenFolder) -> JobFolder:
    if folder.status(MANIFEST_NAME) is None:
        return seen
    values = vars(seen)
    try:
        manifest = read_manifest(folder)
        return JobFolder(**{**values, "kept": seen.kept or manifest.keep, "generation": _generation(folder, manifest)})
    except StorageError as error:
        return JobFolder(**{**values, "problem": error.problem})


def _generation(folder: OpenFolder, manifest: Manifest) -> int | None:
    if folder.status(COMMIT_NAME) is None:
        return None
    records = read_records(
        folder,
        num_tasklets=manifest.extents.num_tasklets,
        num_parameters=len(manifest.description.parameters),
        job=manifest.job,
    )
    return records[0].generation if records else -1


def _regular(folder: OpenFolder, name: str) -> os.stat_result | None:
    status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
    return status if stat.S_ISREG(status.st_mode) and name != LOCK_NAME else None
