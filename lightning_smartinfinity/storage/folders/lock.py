"""File locks, and the lock that gives one process at a time a rank's folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Set as AbstractSet
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageLockedError
from lightning_smartinfinity.storage.folders.lock_content import checkpoint_in, checkpoint_note, packed, unpacked
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.io.deadlines import apart
from lightning_smartinfinity.storage.io.files import write_all
from lightning_smartinfinity.storage.io.os_errors import storage_errors

__all__ = [
    "LOCK_NAME",
    "MOST_BYTES",
    "FolderLock",
    "acquire",
    "is_locked",
    "open_or_create",
    "read_lock",
    "read_notes",
    "reading",
    "remove_unlocked",
    "try_lock",
]

LOCK_NAME = "lock"
MOST_BYTES = 1 << 16
"""Largest size of a lock; a longer file is not a lock of this package."""

_GLANCE = 0.1  # seconds: far more than :func:`is_locked` takes
_HIDDEN_GLANCE, _HIDDEN_SECONDS = 0.01, 1.0
_log = logging.getLogger(__name__)
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """An exclusive ``flock`` on ``<folder>/lock``.

    The file holds the holder's pid and notes, which outlive the holder, such as the names of the files that it made: a
    later process may delete these files.

    A power loss may leave a lock of zeros, which has no notes.

    Args:
        folder: The folder.
        leftover: Function that returns whether the folder certainly holds a leftover. If so, a damaged lock is copied
            to ``lock.<n>.aside``, which is logged, and loses its notes. It is called with the lock held.

    Raises:
        StorageLockedError: Another process (or another store of this one) holds the lock.
        StorageCorruptError: The lock file is damaged, or not of this package.
        StorageError: The lock file cannot be opened or locked, or is of a newer version of this package.

    Attributes:
        notes: The notes, those of earlier holders included.
    """

    def __init__(self, folder: OpenFolder, *, leftover: Callable[[], bool] = lambda: False) -> None:
        self.path = folder.path / LOCK_NAME
        self._folder = folder
        self._descriptor, self.notes = _acquire(folder, leftover)
        # The lock of a store that was never closed must end with the store, not with the process.
        self._close = weakref.finalize(self, apart, partial(os.close, self._descriptor))
        self._writing = threading.Lock()  # a save in the background notes its checkpoint
        _held.add(self)

    def note(self, *notes: str) -> None:
        """Add notes, and flush them to the device.

        Raises:
            StorageError: They could not be written.
        """
        self._write(lambda before: before | set(notes))

    def note_checkpoint(self, path: str, *, step: int) -> None:
        """Note which checkpoint of the training is the newest one; raises as :meth:`note`."""
        note = checkpoint_note(path, step=step)
        self._write(lambda before: {each for each in before if checkpoint_in([each]) is None} | {note})

    def erase(self, *notes: str) -> None:
        """Erase these notes, or all notes if none are named; raises as :meth:`note`."""
        self._write(lambda before: before - set(notes) if notes else set())

    def release(self, *, remove: bool) -> None:
        """Unlock; idempotent. Never raises.

        Args:
            remove: Whether to delete the lock file as well, if possible: the file alone locks nothing.
        """
        if remove and self._close.alive:
            # Delete the file before unlocking: afterwards, the name may already be another process's lock.
            with suppress(OSError):
                self._folder.remove(LOCK_NAME)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor without touching the file."""
        if self._close.detach():
            os.close(self._descriptor)

    def _write(self, change: Callable[[frozenset[str]], AbstractSet[str]]) -> None:
        with self._writing, storage_errors("Writing", self.path):
            if not self._close.alive:  # the descriptor's number may be another file's
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            notes = frozenset(change(self.notes))
            _write(self._descriptor, notes)
            os.fsync(self._descriptor)
            self.notes = notes


def is_locked(folder: OpenFolder) -> bool:
    """Return whether some process holds the folder's lock now."""
    try:
        with reading(folder):
            return False
    except StorageLockedError:
        return True
    except (OSError, StorageError):
        return False


@contextmanager
def reading(folder: OpenFolder) -> Iterator[None]:
    """Keep other processes from using a folder while it is read, except for readers. The lock file is not changed.

    Raises:
        StorageLockedError: A process uses the folder.
        OSError: The lock file cannot be opened or locked.
    """
    if folder.status(LOCK_NAME) is None:  # removed, or not copied with the folder; unused since
        yield
        return
    descriptor = folder.open(LOCK_NAME, os.O_RDONLY)
    try:
        if not try_lock(descriptor, fcntl.LOCK_SH):
            raise _locked_error(folder.path / LOCK_NAME, descriptor)
        yield
    finally:
        os.close(descriptor)


def remove_unlocked(folder: Path) -> None:
    """Remove an empty folder whose last files, such as its lock, were removed while they were open.

    NFS and FUSE give such files hidden names, and remove these a moment after the files are closed.

    Raises:
        OSError: The folder is not empty, or cannot be removed.
    """
    deadline = time.monotonic() + _HIDDEN_SECONDS
    while True:
        try:
            os.rmdir(folder)
            return
        except OSError as error:
            is_late = time.monotonic() >= deadline
            if error.errno != errno.ENOTEMPTY or is_late or not all(map(_is_hidden, os.listdir(folder))):
                raise
        time.sleep(_HIDDEN_GLANCE)


def _is_hidden(name: str) -> bool:
    # NFS and FUSE rename a removed file in this way until the last process has closed it.
    return name.startswith((".nfs", ".fuse_hidden"))


def read_lock(folder: OpenFolder) -> tuple[int | None, frozenset[str]]:
    """Return the pid of the last holder of a folder's lock, if there was one, and its notes.

    Raises:
        StorageCorruptError: The lock file is damaged, or not of this package.
        StorageError: The lock is not a regular file, not trusted, or of a newer version of this package.
        OSError: It cannot be read.
    """
    if folder.status(LOCK_NAME) is None:
        return None, frozenset()
    with folder.reader(LOCK_NAME) as file:
        return unpacked(folder.path / LOCK_NAME, file.read(MOST_BYTES))


def read_notes(folder: OpenFolder) -> frozenset[str]:
    """Return the notes of a folder's lock, none if it is damaged; raises as :func:`read_lock` otherwise."""
    with suppress(StorageCorruptError):
        return read_lock(folder)[1]
    return frozenset()


def acquire(path: Path, *, mode: int, in_use: Callable[[int], StorageLockedError], parent: int | None = None) -> int:
    """Create and lock a file, and return its descriptor; closing the descriptor unlocks the file.

    Args:
        path: Path of the file, in an existing folder. No link is followed.
        mode: Permissions of a new file.
        in_use: Function that returns the error if another process holds the lock, given the file's descriptor.
        parent: Descriptor of the folder in which the last name of ``path`` is looked up; None to use the whole path.

    Raises:
        StorageLockedError: Another process holds the lock.
        OSError: The file cannot be opened or locked.
    """
    name = path if parent is None else Path(path.name)
    while True:
        descriptor = open_or_create(name, mode=mode, parent=parent)
        try:
            if not try_lock(descriptor):
                time.sleep(_GLANCE)  # another process may only be checking the lock
                if not try_lock(descriptor):
                    raise in_use(descriptor)
            if _is_at(name, parent, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The former owner removed the file between our open and our lock: our lock is no longer at this path.
        os.close(descriptor)


def open_or_create(name: str | Path, *, mode: int, parent: int | None = None) -> int:
    """Open a file to read and write, or create it, and return its descriptor. No link is followed.

    Raises:
        OSError: It can be neither opened nor created; FileNotFoundError if its folder is missing.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    # With O_CREAT alone, a file system that remembers a file which another machine has removed opens what is gone.
    with suppress(FileExistsError):
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, mode, dir_fd=parent)
    with suppress(FileNotFoundError):
        return os.open(name, flags, dir_fd=parent)
    return os.open(name, flags | os.O_CREAT, mode, dir_fd=parent)  # it was removed between the two calls


def _acquire(folder: OpenFolder, leftover: Callable[[], bool]) -> tuple[int, frozenset[str]]:
    path = folder.path / LOCK_NAME
    with storage_errors("Locking", path):
        folder.status(LOCK_NAME)  # only a regular file of ours is opened
        descriptor = acquire(path, mode=0o600, in_use=partial(_locked_error, path), parent=folder.descriptor)
        try:
            folder.status(LOCK_NAME)
            content = os.pread(descriptor, MOST_BYTES, 0)
            try:
                pid, notes = unpacked(path, content)
            except StorageCorruptError:
                if len(content) == MOST_BYTES or not leftover():
                    raise
                _copy_to_archive(folder, content)
                pid, notes = None, frozenset()
            os.fchmod(descriptor, 0o600)  # not before: the file may be another program's
            _write(descriptor, notes)
            if pid is None:
                os.fsync(descriptor)  # else a power loss may leave zeros
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor, notes


def _copy_to_archive(folder: OpenFolder, content: bytes) -> None:
    """Copy a damaged lock's content to another name; the file itself stays, because it is locked."""
    archived = folder.archive_name(LOCK_NAME)
    with open(folder.create(archived), "wb") as file:
        file.write(content)
    _log.warning("%r is damaged and was copied to %r; it begins anew.", str(folder.path / LOCK_NAME), archived)


def _write(descriptor: int, notes: Iterable[str]) -> None:
    content = packed(os.getpid(), notes)
    write_all(partial(os.pwrite, descriptor), memoryview(content))
    os.ftruncate(descriptor, len(content))


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without waiting, and return whether that succeeded."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(name: Path, parent: int | None, descriptor: int) -> bool:
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _locked_error(path: Path, descriptor: int) -> StorageLockedError:
    pid: int | None = None
    with suppress(OSError, StorageError):
        pid, _ = unpacked(path, os.pread(descriptor, MOST_BYTES, 0))
    # A shared lock is available only beside other shared locks, which readers take.
    only_read = try_lock(descriptor, fcntl.LOCK_SH)
    user = "a process that reads it" if only_read else f"process {pid or 'unknown'}"
    return StorageLockedError(
        f"The storage folder {str(path.parent)!r} is in use by {user}.",
        "Wait for that job, or give this one its own TransferConfig(job=...) or storage folder.",
    )


def _forget_in_child() -> None:
    # Otherwise a forked DataLoader worker would hold the lock after this process was killed.
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)
