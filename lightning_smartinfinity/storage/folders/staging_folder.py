"""Staging folders, in which one process at a time writes a save or an export until it is complete.

A staging folder holds a marker file (its mark) with the folder's own name, which is locked while the folder is used.
The mark is made first and removed last, so, even after a kill, a folder with other content but no mark was not made by
this package. The system releases the locks of a dead process, so the next process can remove its leftovers.

Everything else is made in a folder with a random name in the staging folder, its room: some file systems cache for
seconds that a name is there, or is not, and a process that made it anew under the same name would not see it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from lightning_smartinfinity.errors import CheckpointError, StorageLockedError, StorageTimeoutError
from lightning_smartinfinity.storage.folders.lock import acquire, open_or_create, remove_unlocked, try_lock
from lightning_smartinfinity.storage.folders.replacement import flush
from lightning_smartinfinity.storage.io.deadlines import doing_now, when_returned
from lightning_smartinfinity.storage.io.files import bounded, limited, unless_removed
from lightning_smartinfinity.storage.io.os_errors import storage_errors

__all__ = ["StagingLock", "is_in_use", "locked", "mark_of", "remove_content", "remove_leftover", "rooms_in"]

_GLANCE = 0.05  # seconds
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP})  # what some network file systems answer


class StagingLock:
    """The lock of a staging folder.

    Attributes:
        leaves_content: Whether the folder stays with its content when it is unlocked, for the next process to lock it.
    """

    def __init__(self) -> None:
        self.leaves_content = False


@contextmanager
def locked(staging: Path, target: str | Path) -> Iterator[StagingLock]:
    """Make and lock a staging folder, and remove it on exit.

    If the disk does not answer, the folder stays, locked until no call is at work in it any more.

    Args:
        staging: The folder, which may be left over from a dead process.
        target: The path to be written, as the user named it.

    Raises:
        StorageLockedError: A live process writes to the same path.
        CheckpointError: The staging folder's path holds something that this package did not make.
        StorageTimeoutError: The disk does not answer.
        OSError: The folder cannot be made or locked.
    """
    before = time.monotonic()
    descriptor = _acquire(staging, target)
    lock = StagingLock()
    try:
        yield lock
    except StorageTimeoutError:
        lock.leaves_content = True
        raise
    finally:
        # Delete the mark before unlocking: afterwards, the name may already be another process's lock.
        try:
            if not lock.leaves_content:
                with suppress(StorageTimeoutError):
                    _remove(staging)
        finally:
            removed = None if lock.leaves_content else staging
            when_returned(partial(_unlock, descriptor, removed), since=before)


def _unlock(descriptor: int, removed: Path | None) -> None:
    """Close a lock, and remove its folder if that was not possible before."""
    os.close(descriptor)
    if removed is not None:
        with suppress(OSError, StorageTimeoutError):  # the folder is gone, or another process has a lock there by now
            limited("Removing", removed, remove_unlocked, removed)


def remove_leftover(staging: Path) -> None:
    """Remove a staging folder that a dead process left, if there is one; a folder in use stays."""
    with suppress(OSError, StorageLockedError, CheckpointError):
        if staging.exists():
            descriptor = _acquire(staging, staging)
            try:
                _remove(staging)
            finally:
                _unlock(descriptor, staging)


def is_in_use(staging: Path) -> bool:
    """Return whether a process has locked a staging folder."""
    try:
        with mark_of(staging).open("rb") as mark:
            return not try_lock(mark.fileno(), fcntl.LOCK_SH)
    except OSError:  # there is none, or its file system has no locks
        return False


def mark_of(staging: Path) -> Path:
    """Return the path of a staging folder's mark."""
    return staging / staging.name  # no target has this name


def rooms_in(staging: Path) -> list[Path]:
    """Return the rooms in a staging folder, newest first: one, unless a killed process's could not be removed.

    Raises:
        StorageError: The folder cannot be read, at the second attempt either. A save that a kill has left in a room
            would be removed if this went unnoticed.
    """
    with storage_errors("Reading", staging):
        try:
            return _rooms_now(staging)
        except OSError:  # a network file system may answer the next call
            time.sleep(_GLANCE)
        return _rooms_now(staging)


def _rooms_now(staging: Path) -> list[Path]:
    rooms: list[tuple[float, str]] = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(staging) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a name that the file system remembers may be gone
                if entry.is_dir(follow_symlinks=False):
                    rooms.append((entry.stat().st_mtime, entry.path))
    return [Path(path) for _, path in sorted(rooms, reverse=True)]


def remove_content(staging: Path) -> None:
    """Remove everything in a staging folder except its mark, as far as possible.

    Raises:
        StorageTimeoutError: The call that this function is part of was given up, so the rest stays.
    """
    with suppress(OSError):
        for entry in staging.iterdir():
            with suppress(OSError):
                if entry.is_dir() and not entry.is_symlink():
                    _remove_tree(entry)
                elif entry != mark_of(staging):
                    entry.unlink()


def _remove_tree(root: Path) -> None:
    """Remove a folder like ``shutil.rmtree``, but with a step (``doing_now``) for each entry."""
    for path, folders, files, descriptor in os.fwalk(root, topdown=False):
        for name in (*folders, *files):
            with doing_now("Removing", os.path.join(path, name)), suppress(OSError):
                try:
                    os.unlink(name, dir_fd=descriptor)
                except IsADirectoryError:
                    os.rmdir(name, dir_fd=descriptor)
    root.rmdir()


@bounded("Locking", undo=os.close)
def _acquire(staging: Path, target: str | Path) -> int:
    return unless_removed(partial(_acquire_once, staging, target))


def _acquire_once(staging: Path, target: str | Path) -> int:
    _require_own(staging)
    staging.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire_mark(mark_of(staging), target)  # the former owner may have removed the folder meanwhile
    try:
        flush(staging)  # else a power loss may leave files that are flushed below it, and no mark
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _acquire_mark(mark: Path, target: str | Path) -> int:
    try:
        return acquire(mark, mode=0o666, in_use=lambda _: _locked_error(target))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return open_or_create(mark, mode=0o666)


def _locked_error(target: str | Path) -> StorageLockedError:
    return StorageLockedError(f"Another process is writing to {target} now.", "Wait for it, or name another path.")


def _require_own(staging: Path) -> None:
    foreign = _foreign_in(staging)
    if foreign is not None:
        raise CheckpointError(
            f"{foreign} is in the way: {staging} is where a new save is written, and this package did not make it.",
            "Move it elsewhere, or save to another path.",
        )


def _foreign_in(staging: Path) -> Path | None:
    """Return the path of something at or in a staging folder that this package did not make, or None."""
    try:
        names = os.listdir(staging)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return staging
    if staging.is_symlink():
        return staging
    return None if not names or staging.name in names else staging / min(names)


@bounded("Removing")
def _remove(staging: Path) -> None:
    """Remove a staging folder with all that is in it, as far as possible."""
    with suppress(OSError):
        remove_content(staging)
        if os.listdir(staging) == [staging.name]:
            mark_of(staging).unlink()
        staging.rmdir()
