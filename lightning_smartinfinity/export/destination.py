"""The place of an export: written under a hidden name beside it, and renamed when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_smartinfinity.errors import CheckpointError, StorageFullError
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.zero3.checkpoints.folder_swap import beside

__all__ = ["require_room", "require_unused", "staged"]


def require_unused(target: Path, *, outside: Path | None = None) -> None:
    """Check that an export to ``target`` replaces nothing.

    Args:
        target: Path of the export.
        outside: Folder that must not contain it.

    Raises:
        CheckpointError: There is something already, or it would lie in ``outside``.
    """
    if outside is not None and Path(os.path.realpath(target)).is_relative_to(os.path.realpath(outside)):
        raise CheckpointError(f"The export {target} would lie in the checkpoint {outside}.", "Name a folder elsewhere.")
    with storage_errors("Looking for", target):
        empty = target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not empty:
        raise CheckpointError(
            f"{target} exists already, and an export replaces nothing.", "Remove it, or name another path."
        )


def require_room(target: Path, num_bytes: int) -> None:
    """Check that so many bytes fit beside ``target``.

    Raises:
        StorageFullError: They do not.
    """
    existing = next(parent for parent in Path(os.path.realpath(target)).parents if parent.exists())
    with storage_errors("Looking for free space in", existing):
        status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    if free < num_bytes:
        raise StorageFullError(
            f"The export {target} needs {num_bytes} bytes, and {free} are free there.",
            "Free space there, or name a path on another file system.",
        )


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a new folder; what the body puts into it under the name of ``target`` becomes ``target`` when it ends.

    If the body raises, nothing is left. The next export to the same path removes what a killed process has left.

    Raises:
        StorageFullError: The disk is full.
        StorageError: The folder cannot be written.
    """
    place = Path(os.path.realpath(target))
    staging = beside(place)
    try:
        with storage_errors("Writing the export", target):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            yield staging / place.name
            for path in (*(staging / place.name).glob("*"), staging / place.name):
                _flush(path)
            with suppress(FileNotFoundError, NotADirectoryError):
                os.rmdir(place)  # it is empty: rename replaces no folder by a file
            os.rename(staging / place.name, place)
            _flush(place.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _flush(path: Path) -> None:
    """Return when the entries of a folder, or the content of a file, are on the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
