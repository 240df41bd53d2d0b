"""A folder that is opened once: its files are opened relative to its descriptor, and no link is followed.

Other users may have write access to a storage folder. Links, pipes, devices, folders and files that they put in the
place of this package's files must neither be used nor redirect access to other files.
"""

from __future__ import annotations

import os
import pwd
import secrets
import stat
import weakref
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.folders.replacement import flush_open
from lightning_smartinfinity.storage.io.deadlines import apart
from lightning_smartinfinity.storage.io.files import write_all

__all__ = ["ARCHIVE", "OpenFolder", "Trust", "not_followed", "refuse_foreign"]

ARCHIVE = ".aside"
"""Suffix of the names of damaged files that were archived, and of jobs whose trainings were."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe would block without O_NONBLOCK.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


class Trust(Enum):
    """Requirements on a folder and its files when they are opened."""

    MADE = auto()
    """This process has just made the folder. It is made private, and files must have the folder's owner."""

    OWN = auto()
    """Folder and files must belong to this process's user, even if it is root, and only it may write to the folder."""

    ANY = auto()
    """Any owner and mode, for reading only."""


class OpenFolder:
    """A folder, open until :meth:`close` or the end of this object.

    Args:
        path: Path of the folder, which must not be a link itself.
        parent: Descriptor of the folder above, in which the last name of ``path`` is looked up; None to use the whole
            path.
        trust: Requirements on the folder and its files.

    Raises:
        StorageError: The folder is a link, or not trusted.
        OSError: It cannot be opened.

    Attributes:
        path: Its path, for messages.
        descriptor: Its descriptor.
    """

    def __init__(self, path: Path, *, parent: int | None = None, trust: Trust = Trust.OWN) -> None:
        self.path = path
        self.descriptor = _open_folder(path, parent)
        self._close = weakref.finalize(self, apart, partial(os.close, self.descriptor))
        self._owner: int | None = None
        try:
            if trust is not Trust.ANY:
                self._owner = _owner_of(path, self.descriptor, trust)
        except BaseException:
            self.close()
            raise

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of a file, or None if nothing has that name.

        Raises:
            StorageError: It is not a regular file, or not trusted.
            OSError: The status cannot be read.
        """
        try:
            status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._require_file(name, status)
        return status

    def open(self, name: str, flags: int) -> int:
        """Open a regular file and return its descriptor; raises as :meth:`status`. A new file is private."""
        self.status(name)  # refuses a device before opening it, which can already change it
        try:
            descriptor = os.open(name, flags | _FILE, 0o600, dir_fd=self.descriptor)
        except PermissionError:
            refuse_foreign(self.path / name, parent=self.descriptor)
            raise
        try:
            self._require_file(name, os.fstat(descriptor))
            os.set_blocking(descriptor, True)  # io_uring would not wait for the disk
            if flags & os.O_CREAT:
                os.fchmod(descriptor, 0o600)  # whatever the umask
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def create(self, name: str) -> int:
        """Create a file that must not exist yet, and return its descriptor; raises as :meth:`status`."""
        return self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_unnamed(self) -> int:
        """Create an unnamed file, which is deleted when it is closed, and return its descriptor.

        Raises:
            OSError: It cannot be created.
        """
        with suppress(OSError):  # not all file systems have such files
            return os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        name = f".{secrets.token_hex(8)}.tmp"
        descriptor = self.create(name)
        self.remove(name)
        return descriptor

    def reader(self, name: str) -> BinaryIO:
        """Open a file for reading; raises as :meth:`status`."""
        return open(self.open(name, os.O_RDONLY), "rb")

    def read(self, name: str) -> bytes:
        """Return the content of a file; raises as :meth:`status`."""
        with self.reader(name) as file:
            return file.read()

    def overwrite(self, name: str, content: bytes, *, offset: int | None = None, flush: bool) -> int:
        """Write into an existing file, and return the number of bytes written; raises as :meth:`status`.

        Args:
            name: Name of the file.
            content: Bytes to write.
            offset: Their offset in the file; None to make them the whole content.
            flush: Whether to flush the file.
        """
        descriptor = self.open(name, os.O_WRONLY)
        try:
            write_all(partial(os.pwrite, descriptor), memoryview(content), offset or 0)
            if offset is None:
                os.ftruncate(descriptor, len(content))
            if flush:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        return len(content)

    def replace(self, name: str, content: bytes, *, temporary: str, flush: bool = True) -> None:
        """Write a file atomically: a reader sees the old content, the new one, or no file.

        Args:
            name: Name of the file.
            content: Its content.
            temporary: Name of the file until it is complete; it must be free, and is free again afterwards.
            flush: Whether to flush the content.

        Raises:
            StorageError, OSError: As for :meth:`status`, or it could not be written.
        """
        self.status(name)
        descriptor = self.create(temporary)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if flush:  # before the rename: a power loss could otherwise leave the name without the content
                    os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            self.remove(temporary)
            raise

    def rename(self, name: str, to: str) -> None:
        """Rename a file."""
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Delete a file if it exists. The target of a link stays."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except FileNotFoundError:
            return

    def names(self) -> list[str]:
        """Return the names of everything in the folder."""
        return sorted(os.listdir(self.descriptor))

    def archive_name(self, name: str) -> str:
        """Return a free name under which to keep a damaged file of this name: ``<name>.<n>.aside``."""
        taken = set(self.names())
        return next(new for number in range(1, len(taken) + 2) if (new := f"{name}.{number}{ARCHIVE}") not in taken)

    def flush(self) -> None:
        """Flush the folder's entries, so that they survive a power loss."""
        flush_open(self.descriptor)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._close.detach():
            os.close(self.descriptor)
        self.descriptor = -1  # its number may become another folder's

    def _require_file(self, name: str, status: os.stat_result) -> None:
        path = str(self.path / name)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(
                f"{path!r} is {kind_of(status.st_mode)}, and not a regular file.",
                "Remove it, or choose another TransferConfig(job=...).",
            )
        if self._owner is None:
            return
        if status.st_uid != self._owner:
            raise _foreign(path, status.st_uid, self._owner)
        if status.st_nlink > 1:
            raise StorageError(
                f"{path!r} is the same file as another name (it has {status.st_nlink} hard links).",
                "Make it a file of its own (cp -r the folder), or choose another TransferConfig(job=...).",
            )


def kind_of(mode: int) -> str:
    """Return the kind of a file that is not regular by its mode, such as "a pipe"."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def not_followed(path: Path) -> StorageError:
    """Return the error about a symbolic link in place of a job's or rank's folder.

    Args:
        path: Path of the link, from ``/``.
    """
    target = Path(os.path.realpath(path))
    remedy = f"Remove the link, and move the folder {str(target)!r} to {str(path)!r}."
    levels = 2 if path.name.startswith("rank-") else 1  # below the storage folder
    if target.parts[-levels:] == path.parts[-levels:]:
        remedy += (
            f" Or name {str(target.parents[levels - 1])!r} as storage in place of {str(path.parents[levels - 1])!r}."
        )
    return StorageError(f"{str(path)!r} is a symbolic link, which is not followed.", remedy)


def _open_folder(path: Path, parent: int | None) -> int:
    name = str(path) if parent is None else path.name
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise not_followed(path) from None
        raise
    except PermissionError:
        refuse_foreign(path, parent=parent)
        raise


def _owner_of(path: Path, descriptor: int, trust: Trust) -> int:
    """Make a new folder private or check an existing one, and return its owner."""
    if trust is Trust.MADE:
        os.fchmod(descriptor, 0o700)  # whatever the umask
    status = os.fstat(descriptor)
    if trust is Trust.OWN:
        if status.st_uid != os.geteuid():
            raise _foreign(str(path), status.st_uid, os.geteuid())
        if status.st_mode & _OTHERS_WRITE:
            raise StorageError(
                f"Other users may write to the folder {str(path)!r} (mode {stat.S_IMODE(status.st_mode):04o}), which "
                "this process did not make.",
                "If all of it is yours, run: chmod -R go-w on it. Otherwise choose another TransferConfig(job=...).",
            )
    return status.st_uid


def refuse_foreign(path: Path, *, parent: int | None = None) -> None:
    """Raise StorageError if a path, which this user may not read, is another user's.

    Args:
        path: Path of a file or folder.
        parent: Descriptor of the folder in which its last name is looked up; None to use the whole path.
    """
    with suppress(OSError):
        owner = os.stat(str(path) if parent is None else path.name, dir_fd=parent, follow_symlinks=False).st_uid
        if owner != os.geteuid():
            raise _foreign(str(path), owner, os.geteuid())


def _foreign(path: str, owner: int, wanted: int) -> StorageError:
    return StorageError(
        f"{path!r} belongs to user {_user(owner)}, and not to {_user(wanted)}.",
        "Choose another TransferConfig(job=...) or storage folder, or ask that user to remove it.",
    )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
