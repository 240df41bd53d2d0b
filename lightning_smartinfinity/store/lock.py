"""Locks of files, and the lock of a store's folder: one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from lightning_smartinfinity.errors import StorageLockedError
from lightning_smartinfinity.store.os_errors import storage_errors

__all__ = ["FolderLock", "acquire", "is_locked"]

_LOCK_NAME = "lock"
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """An exclusive ``flock`` on ``<folder>/lock``, whose text is the holder's pid.

    Args:
        folder: An existing folder.

    Raises:
        StorageLockedError: Another process (or another store of this one) holds it.
        StorageError: The lock file cannot be opened or locked.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _LOCK_NAME
        # The lock of a store that was never closed must end with the store, not with the process.
        self._close = weakref.finalize(self, os.close, _acquire(self.path))
        _held.add(self)

    def release(self, *, remove: bool) -> None:
        """Unlock; idempotent. Never raises.

        Args:
            remove: Whether to delete the lock file as well, if possible: the file alone locks nothing.
        """
        if remove and self._close.alive:
            # The file goes before the lock: after unlocking, the name may already be another process's lock.
            with suppress(OSError):
                self.path.unlink()
        self.forget()

    def forget(self) -> None:
        """Close the descriptor without touching the file."""
        self._close()


def is_locked(folder: Path) -> bool:
    """Return whether some process holds the folder's lock now."""
    try:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def acquire(path: Path, *, mode: int, in_use: Callable[[int], StorageLockedError]) -> int:
    """Create and lock a file, and return its descriptor, which unlocks when it is closed.

    Args:
        path: Path of the file, in an existing folder.
        mode: Permissions of a new file.
        in_use: Function that makes the error if another process holds the lock; it gets the file's descriptor.

    Raises:
        StorageLockedError: Another process holds it.
        OSError: The file cannot be opened or locked.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            if not _try_lock(descriptor):
                raise in_use(descriptor)
            if _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The former owner removed the file between our open and our lock: our lock is no longer at this path.
        os.close(descriptor)


def _acquire(path: Path) -> int:
    with storage_errors("Locking", path):
        descriptor = acquire(path, mode=0o600, in_use=partial(_locked_error, path))
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _locked_error(path: Path, descriptor: int) -> StorageLockedError:
    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    return StorageLockedError(
        f"The storage folder {str(path.parent)!r} is in use by process {holder}.",
        "Wait for that job, or give this one its own TransferConfig(job=...) or storage folder.",
    )


def _forget_in_child() -> None:
    # Otherwise a forked DataLoader worker would hold the lock after this process was killed.
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)
