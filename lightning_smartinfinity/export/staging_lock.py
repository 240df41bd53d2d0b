"""The lock of an export's staging folder: one process at a time writes what is to become a path."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_smartinfinity.errors import StorageLockedError

__all__ = ["locked", "remove_content"]


@contextmanager
def locked(staging: Path, target: Path) -> Iterator[None]:
    """Make and lock a staging folder, and remove it in the end.

    The system unlocks what a dead process held, so its leftovers hinder nobody.

    Args:
        staging: The folder, which may be left over from a dead process.
        target: The path that it is for, as the user named it.

    Raises:
        StorageLockedError: A live process writes to the same path.
        OSError: The folder cannot be made or locked.
    """
    descriptor = _acquire(staging, target)
    try:
        yield
    finally:
        remove_content(staging)
        # The file goes before the lock: after unlocking, the name may already be another process's lock.
        with suppress(OSError):
            _lock_file(staging).unlink()
        with suppress(OSError):  # another process may have made its lock there
            staging.rmdir()
        os.close(descriptor)


def remove_content(staging: Path) -> None:
    """Remove what lies in a staging folder beside its lock, as far as possible."""
    with suppress(OSError):
        for entry in staging.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry != _lock_file(staging):
                entry.unlink()


def _lock_file(staging: Path) -> Path:
    return staging / staging.name  # no target has this name: it is made of a hash of the target's name


def _acquire(staging: Path, target: Path) -> int:
    while True:
        staging.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(_lock_file(staging), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the former owner removed the folder after our mkdir
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(_lock_file(staging), descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise StorageLockedError(
                f"Another process is writing an export or a model to {target} now.",
                "Wait for it, or name another path.",
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        # The former owner removed the file between our open and our lock: our lock is no longer at this path.
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
