"""Replaces folders and files, so that neither a kill nor a power loss loses both the old and the new one.

Flushing a folder puts renames in it on the device, but not the content of the renamed folder or file, which must be
flushed itself. So the order is: :func:`flush_tree`, rename, :func:`flush_names`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from lightning_smartinfinity.storage.io.files import bounded

__all__ = [
    "beside",
    "exchange",
    "flush",
    "flush_names",
    "flush_open",
    "flush_tree",
    "link_others",
    "put_back",
    "put_in_place",
]

_STAGING = ".saving"
_PREVIOUS = ".saving-previous"  # no target has such a name
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP})  # errors of network file systems for a folder
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


def beside(target: Path) -> Path:
    """Return the path under which a new ``target`` is written until it is complete."""
    # The target's name is left out: Lightning takes every entry with "last" in its name for a checkpoint.
    return target.with_name(f"{_STAGING}-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}")


def put_in_place(new: Path, old: Path) -> None:
    """Put ``new`` in the place of ``old``, which need not exist. An old entry gets the path of ``new``.

    Where the system cannot exchange them in one call, three renames do so. If a process is killed while nothing is at
    ``old``, :func:`put_back` restores it.

    Raises:
        OSError: A call failed.
    """
    if not os.path.lexists(old):
        os.rename(new, old)
    elif not exchange(new, old):
        with suppress(FileNotFoundError):  # another machine has removed it, and the file system remembers it
            os.rename(old, new.parent / _PREVIOUS)
        os.rename(new, old)
        with suppress(FileNotFoundError):
            os.rename(new.parent / _PREVIOUS, new)


def put_back(staging: Path, old: Path) -> None:
    """Undo a replacement by renames that was interrupted while nothing was at ``old``, or finish one that got further.

    Any number of processes may call it at once.

    Args:
        staging: Folder that holds, or held, the replacement under the name of ``old``.
        old: Path to be replaced.
    """
    place = staging / old.name if os.path.lexists(old) else old
    if (staging / _PREVIOUS).exists() and not os.path.lexists(place):
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(staging / _PREVIOUS, place)


@bounded("Flushing")
def flush(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to the device.

    Anything but a regular file or a folder is ignored, and so is a folder whose file system cannot flush folders.

    Raises:
        OSError: They could not be written.
        StorageTimeoutError: The disk does not answer.
    """
    # A FIFO would block without O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        flush_open(descriptor)
    finally:
        os.close(descriptor)


def flush_open(descriptor: int) -> None:
    """Flush an open file or folder, as :func:`flush` does for a path."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        os.fsync(descriptor)
    elif stat.S_ISDIR(mode):
        _flush_folder(descriptor)


@bounded("Flushing")
def flush_tree(root: Path) -> None:
    """Flush a file, or a folder with everything below it, to the device.

    Symbolic links are not followed.

    Raises:
        OSError: Something could not be written.
        StorageTimeoutError: The disk does not answer.
    """
    if not root.is_dir():
        return flush(root)
    for path, _, files in os.walk(root, topdown=False, onerror=_raise):
        for file in files:
            if not os.path.islink(os.path.join(path, file)):
                flush(Path(path, file))
        flush(Path(path))


@bounded("Flushing the folders above")
def flush_names(path: Path) -> None:
    """Flush a path's entry in its folder, that folder's entry in the one above, and so on.

    The folders above may be as new as ``path``. Folders on another file system are left out, and so are folders that
    this user may not read, in which this user has made nothing.

    Raises:
        OSError: A folder could not be written.
        StorageTimeoutError: The disk does not answer.
    """
    device = path.stat().st_dev
    for folder in path.absolute().parents:
        if folder.stat().st_dev != device:
            return
        with suppress(PermissionError):
            flush(folder)


def link_others(old: Path, new: Path, *, replaced: Collection[str]) -> None:
    """Link files and folders that only the old folder has into the new one.

    Args:
        old: The old folder.
        new: The folder that will replace it.
        replaced: Name patterns of files that are not linked, because the new folder replaces them.

    Raises:
        OSError: A file can be neither linked nor copied.
    """
    for entry in old.iterdir():
        is_folder = entry.is_dir() and not entry.is_symlink()
        # Do not look up such a name in `new`: another machine may be about to write the file, and network file systems
        # remember for a while that it was missing.
        is_replaced = not is_folder and any(fnmatch(entry.name, pattern) for pattern in replaced)
        if is_replaced or os.path.lexists(new / entry.name):
            continue
        if is_folder:
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, new / entry.name)


def _link(old: str | Path, new: str | Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        shutil.copy2(old, new, follow_symlinks=False)


def _flush_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise


def _raise(error: OSError) -> None:
    raise error


def exchange(first: Path, second: Path) -> bool:
    """Exchange two entries by one system call; return False if the file system or the C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
