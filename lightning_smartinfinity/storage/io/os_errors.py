"""Turns errors of the operating system and of third-party code into this package's errors, with a remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import (
    ConfigError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from lightning_smartinfinity.storage.io.deadlines import doing_now

__all__ = [
    "FULL",
    "failure_error",
    "in_milliseconds",
    "in_short",
    "require_io_engine",
    "storage_error",
    "storage_errors",
]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Values of ``errno`` that mean that the space, the inodes or the user's quota are used up."""

_OTHER_REMEDY = "Check the file system and the device, or choose another folder."
_REMEDIES = {
    errno.EACCES: "Give this user read and write permission there, or choose another folder.",
    errno.EPERM: "Give this user read and write permission there, or choose another folder.",
    errno.EROFS: "The file system is mounted read-only: remount it, or choose another folder.",
    errno.ENOTDIR: "A file stands where a folder should be: remove it, or choose another folder.",
    errno.EEXIST: "A file stands where a folder should be: remove it, or choose another folder.",
    errno.EISDIR: "A folder stands where a file should be: remove it, or choose another folder.",
    errno.ENOENT: "It cannot be created there, or it was removed: choose another folder, or restore it.",
    errno.ENAMETOOLONG: "Use a shorter storage folder or TransferConfig(job=...).",
    errno.EIO: "The device reports an I/O error: check the kernel log and the device's health.",
    errno.EMFILE: "Raise this process's limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the system's limit of open files (sysctl fs.file-max).",
    errno.EAGAIN: "Raise this user's limit of threads (ulimit -u), or that of the container.",
    errno.ENOMEM: "Free host memory, or take less: TransferConfig(num_buffers=..., dram_cache_bytes=...).",
    errno.EFBIG: "Raise this process's file size limit (ulimit -f), or use several storage folders.",
}


def storage_error(number: int, *, problem: str) -> StorageError:
    """Return the error for a failed system call, with the remedy for its kind of failure.

    Args:
        number: The call's ``errno``.
        problem: A sentence that names the failed action, the path and the system's message.
    """
    if number in FULL:
        return StorageFullError(problem, "Free space there, or choose a folder on a larger file system.")
    return StorageError(problem, _REMEDIES.get(number, _OTHER_REMEDY))


def failure_error(failure: native.Failure, *, what: str) -> StorageError:
    """Return the error for a transfer that the native core could not complete.

    Args:
        failure: The core's failure, whose message names path and offset.
        what: Name of the data, such as ``"Optimizer state"``.
    """
    problem = f"{what}: {failure.message}."
    if failure.kind == "timeout":
        return StorageTimeoutError(problem, StorageTimeoutError.REMEDY)
    if failure.kind == "checksum":
        return StorageCorruptError(problem, "Check the device, and resume from a checkpoint.")
    if failure.kind == "generation":
        return StorageError(problem, "See the earlier write error; to continue, resume from a checkpoint.")
    if failure.kind == "short":
        return StorageError(problem, "The file was truncated: resume from a checkpoint with a new store.")
    return storage_error(failure.errno, problem=problem)


def in_milliseconds(seconds: float) -> int:
    """Return a time limit in milliseconds, at least one, for the native core."""
    return max(1, round(1000 * seconds))


def require_io_engine(name: str) -> None:
    """Check that an engine of ``TransferConfig.io_engine`` is available on this system.

    Raises:
        ConfigError: It is unavailable.
    """
    reason = dict(native.io_engines()).get(name)
    if reason is not None:
        raise ConfigError(
            f"TransferConfig(io_engine={name!r}) is unavailable here: {reason}.",
            "Use io_engine='auto', which selects an available engine.",
        )


@contextmanager
def storage_errors(doing: str, path: str | Path) -> Iterator[None]:
    """Turn every OSError inside into a :class:`StorageError` about ``path``.

    If a call with a time limit is given up inside, its error names ``path``, too (:func:`~.deadlines.doing_now`).

    Args:
        doing: The attempted action, such as ``"Creating the folder"``.
        path: Path of the file or folder.
    """
    try:
        with doing_now(doing, path):
            yield
    except OSError as error:
        problem = f"{doing} {str(path)!r} failed: {error.strerror or error}."
        raise storage_error(error.errno or 0, problem=problem) from error


def in_short(error: BaseException) -> str:
    """Return the class and the first line of a third-party error, in at most 160 characters."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:160].rstrip(" .:")
