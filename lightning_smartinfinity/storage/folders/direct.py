"""Opens state files, with direct I/O (past the page cache) where the file system supports it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.io.scheduling import scheduler_of

__all__ = [
    "adopt_descriptor",
    "choose_direct",
    "has_direct",
    "make_direct",
    "UNNAMED",
    "make_unnamed_file",
    "open_file",
    "open_state_file",
]

UNNAMED = "(unnamed file)"
"""Placeholder in messages for the name of an unnamed file."""

# f_type (from fstatfs) of file systems that live in memory; recent kernels accept O_DIRECT even on tmpfs.
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}


def choose_direct(folder: OpenFolder, name: str, choice: str) -> bool:
    """Decide whether to open a file with O_DIRECT.

    Args:
        folder: The folder with the file.
        name: Its name.
        choice: ``TransferConfig.direct_io``: ``"auto"``, ``"on"`` or ``"off"``.

    Returns:
        Whether to use O_DIRECT.

    Raises:
        StorageError: The file has no direct I/O, and ``choice`` is ``"on"``.
    """
    return _choose(folder, choice, partial(_read_one_block, folder, name))


def _choose(folder: OpenFolder, choice: str, try_direct: Callable[[], None]) -> bool:
    if choice == "off":
        return False
    reason = _refusal(folder, try_direct)
    if reason is None:
        return True
    problem = f"{str(folder.path)!r} has no direct I/O: {reason}."
    remedy = "Choose a storage folder on a block device"
    if choice == "on":
        raise StorageError(problem, f"{remedy}, or TransferConfig(direct_io='auto').")
    warnings.warn(
        f"{problem} Data stored there goes through the page cache and competes for host memory. {remedy},"
        " or TransferConfig(direct_io='off') to silence this warning.",
        stacklevel=2,
    )
    return False


def has_direct(folder: OpenFolder, name: str) -> bool:
    """Return whether a file can be opened with O_DIRECT. Does not warn if it cannot."""
    return _refusal(folder, partial(_read_one_block, folder, name)) is None


def open_state_file(
    folder: OpenFolder,
    name: str,
    direct_io: str,
    *,
    access: int = os.O_RDWR,
) -> native.StateFile:
    """Open an existing file in a folder, with O_DIRECT if :func:`choose_direct` decides so.

    One scheduler orders all of this process's transfers on the file's device.

    Args:
        folder: The folder with the file.
        name: Its name.
        direct_io: ``TransferConfig.direct_io``.
        access: ``os.O_RDWR`` or ``os.O_RDONLY``.

    Raises:
        StorageError: The file cannot be opened, or has no direct I/O while ``direct_io`` is ``"on"``.
    """
    with storage_errors("Opening", folder.path / name):
        return open_file(folder, name, direct=choose_direct(folder, name, direct_io), access=access)


def open_file(folder: OpenFolder, name: str, *, direct: bool, access: int = os.O_RDWR) -> native.StateFile:
    """Open an existing file as :func:`open_state_file` does, with or without O_DIRECT.

    Raises:
        StorageError: It is not a regular file, or not trusted.
        OSError: It cannot be opened.
    """
    descriptor = folder.open(name, access | (os.O_DIRECT if direct else 0))
    return adopt_descriptor(folder.path / name, descriptor, direct=direct, scheduler=scheduler_of(descriptor))


def make_unnamed_file(folder: OpenFolder, *, direct_io: str) -> native.StateFile:
    """Create an unnamed file in a folder, with O_DIRECT if :func:`choose_direct` would decide so.

    Raises:
        StorageError: It has no direct I/O while ``direct_io`` is ``"on"``.
        OSError: It cannot be created.
    """
    descriptor = folder.open_unnamed()
    try:
        direct = _choose(folder, direct_io, partial(make_direct, descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    path = folder.path / UNNAMED
    return adopt_descriptor(path, descriptor, direct=direct, scheduler=scheduler_of(descriptor))


def make_direct(descriptor: int) -> None:
    """Turn on direct I/O for a new file. Creating it with O_DIRECT would leave a file even if that is refused.

    Raises:
        OSError: Its file system refuses.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        _read_first_block(descriptor)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        raise


def adopt_descriptor(
    path: Path, descriptor: int, *, direct: bool, scheduler: native.IoScheduler | None = None
) -> native.StateFile:
    """Return a file for the native core, which closes the descriptor.

    Args:
        path: Path of the file, which need not be valid UTF-8.
        descriptor: Its open descriptor.
        direct: Whether the descriptor has O_DIRECT.
        scheduler: Scheduler that orders its transfers, or None.
    """
    return _File(path, descriptor=descriptor, direct=direct, scheduler=scheduler)


class _File(native.StateFile):
    """A file whose name need not be valid UTF-8. The core needs the path only for its messages, which are text."""

    def __init__(
        self, path: Path, *, descriptor: int, direct: bool, scheduler: native.IoScheduler | None = None
    ) -> None:
        text = os.fsencode(path).decode(errors="backslashreplace")
        super().__init__(text, direct=direct, descriptor=descriptor, scheduler=scheduler)
        self._path = str(path)

    @property
    def path(self) -> str:
        return self._path


def _refusal(folder: OpenFolder, try_direct: Callable[[], None]) -> str | None:
    """Return why a file in a folder has no direct I/O, or None if it has."""
    memory = _MEMORY_FILE_SYSTEMS.get(_file_system_type(folder.descriptor))
    if memory is not None:
        return f"it is a {memory}, which lives in host memory"
    try:
        try_direct()
    except OSError as error:
        return f"its file system refuses O_DIRECT in blocks of {BLOCK_BYTES} bytes ({error.strerror})"
    return None


def _read_one_block(folder: OpenFolder, name: str) -> None:
    descriptor = folder.open(name, os.O_RDONLY | os.O_DIRECT)
    try:
        _read_first_block(descriptor)
    finally:
        os.close(descriptor)


def _read_first_block(descriptor: int) -> None:
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        os.preadv(descriptor, [block], 0)


def _file_system_type(descriptor: int) -> int:
    # os.statvfs lacks f_type; it is the first, word-sized member of struct statfs on Linux.
    buffer = (ctypes.c_ulong * 64)()
    if ctypes.CDLL(None, use_errno=True).fstatfs(descriptor, buffer) != 0:
        return 0
    return buffer[0] & 0xFFFFFFFF
