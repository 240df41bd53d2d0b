"""The lock of an export's staging folder: one process at a time writes what is to become a path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from lightning_smartinfinity.errors import StorageLockedError, StorageTimeoutError
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.store.lock import acquire

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
        StorageTimeoutError: The disk does not answer.
        OSError: The folder cannot be made or locked.
    """
    descriptor = unless_idle(partial(_acquire, staging, target), doing="Locking", path=staging, undo=os.close)
    try:
        yield
    finally:
        with suppress(StorageTimeoutError):
            unless_idle(partial(_remove, staging), doing="Removing", path=staging)
        os.close(descriptor)


def _remove(staging: Path) -> None:
    remove_content(staging)
    # The file goes before the lock: after unlocking, the name may already be another process's lock.
    with suppress(OSError):
        _lock_file(staging).unlink()
    with suppress(OSError):  # another process may have made its lock there
        staging.rmdir()


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
        # The former owner may remove the folder after our mkdir.
        with suppress(FileNotFoundError):
            return acquire(_lock_file(staging), mode=0o666, in_use=lambda _: _locked_error(target))


def _locked_error(target: Path) -> StorageLockedError:
    return StorageLockedError(
        f"Another process is writing an export or a model to {target} now.", "Wait for it, or name another path."
    )
