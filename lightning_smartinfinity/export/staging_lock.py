"""The lock of an export's staging folder, which is its mark: one process at a time writes what is to become a path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from lightning_smartinfinity.errors import StorageLockedError
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.store.lock import acquire
from lightning_smartinfinity.store.staging_folder import mark_of, remove_staging_unless_idle, require_own_staging

__all__ = ["locked"]


@contextmanager
def locked(staging: Path, target: Path) -> Iterator[None]:
    """Make and lock a staging folder, and remove it in the end.

    The system unlocks what a dead process held, so its leftovers hinder nobody.

    Args:
        staging: The folder, which may be left over from a dead process.
        target: The path that it is for, as the user named it.

    Raises:
        StorageLockedError: A live process writes to the same path.
        CheckpointError: Something lies there that this package did not make.
        StorageTimeoutError: The disk does not answer.
        OSError: The folder cannot be made or locked.
    """
    descriptor = unless_idle(partial(_acquire, staging, target), doing="Locking", path=staging, undo=os.close)
    try:
        yield
    finally:
        # The file goes before the lock: after unlocking, the name may already be another process's lock.
        remove_staging_unless_idle(staging)
        os.close(descriptor)


def _acquire(staging: Path, target: Path) -> int:
    while True:
        staging.mkdir(parents=True, exist_ok=True)
        require_own_staging(staging)
        # The former owner may remove the folder after our mkdir.
        with suppress(FileNotFoundError):
            return acquire(mark_of(staging), mode=0o666, in_use=lambda _: _locked_error(target))


def _locked_error(target: Path) -> StorageLockedError:
    return StorageLockedError(
        f"Another process is writing an export or a model to {target} now.", "Wait for it, or name another path."
    )
