"""Removes a job from a storage folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.folders.open_folder import not_followed
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.jobs.jobs import Job

__all__ = ["remove_job"]


def remove_job(job: Job, *, kept: bool) -> list[Path]:
    """Delete a job that no process uses: all files of this package in the job's folders here.

    Args:
        job: The job.
        kept: Whether to delete state that is to be kept, too.

    Returns:
        The folders that remain because they hold other files.

    Raises:
        StorageLockedError: A process uses the job. Nothing was deleted.
        StorageError: The job is to be kept or belongs to another user, and nothing was deleted; or a file cannot be
            deleted.
        StorageTimeoutError: The disk does not answer.
    """
    if not job.listed:
        if (job.storage / job.name).is_symlink():
            raise not_followed((job.storage / job.name).absolute())
        raise StorageError(job.problems[0], "Only the user who owns the folder, or root, can remove it.")
    return limited("Removing", job.storage / job.name, _remove_job, job, kept=kept)


def _remove_job(job: Job, *, kept: bool) -> list[Path]:
    with ExitStack() as locked:
        folders = []
        for folder in job.folders:
            folders.append(RankFolder(folder.path, create=False))
            locked.callback(folders[-1].discard)
        # Ask the locked folders again: the job may have run since it was listed.
        if not kept and any(owned.is_kept() for owned in folders):
            raise StorageError(
                f"The optimizer state of the job {job.name!r} in {str(job.storage)!r} is to be kept.",
                "To remove it all the same, pass --kept.",
            )
        for owned in folders:
            owned.destroy()
    return [folder.path for folder in job.folders if folder.path.exists()]
