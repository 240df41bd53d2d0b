"""The target of an export, which is written under a hidden name in the same folder and renamed when it is complete."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_smartinfinity.errors import (
    CheckpointError,
    ConfigError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from lightning_smartinfinity.storage.folders.replacement import (
    beside,
    flush_names,
    flush_tree,
    link_others,
    put_back,
    put_in_place,
)
from lightning_smartinfinity.storage.folders.staging_folder import locked, remove_content, rooms_in
from lightning_smartinfinity.storage.io.deadlines import doing_now
from lightning_smartinfinity.storage.io.files import bounded, is_unused, limited
from lightning_smartinfinity.storage.io.os_errors import storage_errors

__all__ = ["require_folder", "require_outside", "require_room", "require_unused", "resolved", "staged"]

_OLDER_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*")


def resolved(target: Path) -> Path:
    """Return the path of an export, with links and dots resolved.

    Raises:
        ConfigError: The path cannot be replaced: it has a NUL byte, is a mount point, or holds the current folder.
        CheckpointError: It is a link to a path that does not exist.
        StorageError: It cannot be read.
    """
    if "\0" in str(target):
        raise ConfigError(f"The path {str(target)!r} contains a NUL byte.", "Name another path.")
    with storage_errors("Looking at", target):
        place = Path(os.path.realpath(target))
        current = Path(os.path.realpath(os.getcwd()))
    if current.is_relative_to(place):
        raise ConfigError(
            f"The export {str(target)!r} would replace {place}, which is or holds the current folder.",
            "Name a folder in it, or run this from another folder.",
        )
    if os.path.ismount(place):
        raise ConfigError(f"{target} is a mount point, which cannot be replaced.", "Name a folder in it.")
    if os.path.islink(target) and not place.exists():
        raise CheckpointError(
            f"{target} is a link to {place}, which does not exist.", "Remove it, or name another path."
        )
    return place


def require_folder(target: Path) -> None:
    """Check that ``target`` is a folder, or does not exist.

    Raises:
        CheckpointError: It is not a folder.
    """
    if os.path.lexists(target) and not target.is_dir():
        raise CheckpointError(f"{target} is no folder, and models are saved as folders.", "Name another path.")


def require_outside(target: Path, checkpoint: Path) -> None:
    """Check that ``target`` is outside the checkpoint from which it is exported.

    Raises:
        CheckpointError: It is inside.
    """
    exists = os.path.lexists(checkpoint)  # False for a path with a NUL byte, which realpath refuses
    if exists and Path(os.path.realpath(target)).is_relative_to(os.path.realpath(checkpoint)):
        raise CheckpointError(
            f"The export {target} would be inside the checkpoint {checkpoint}.", "Name a folder elsewhere."
        )


def require_unused(target: Path) -> None:
    """Check that ``target`` does not exist, or is an empty folder.

    Raises:
        CheckpointError: It exists already.
    """
    with storage_errors("Looking for", target):
        unused = is_unused(target)
    if not unused:
        raise CheckpointError(
            f"{target} exists already, and an export replaces nothing.", "Remove it, or name another path."
        )


def require_room(target: Path, num_bytes: int) -> None:
    """Check that the file system of ``target`` has room for ``num_bytes``.

    Raises:
        StorageFullError: It has too little room.
        StorageTimeoutError: The disk does not answer.
        StorageError: No file can be written there.
    """
    existing, status = _room(target)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks == 0:  # size unknown, as for /proc and some network file systems
        _require_writable(existing, target)
    elif free < num_bytes:
        raise StorageFullError(
            f"The export {target} needs {num_bytes} bytes, and {free} are free there.",
            "Free space there, or name a path on another file system.",
        )


@bounded("Looking for free space for")
def _room(target: Path) -> tuple[Path, os.statvfs_result]:
    existing = next(parent for parent in Path(os.path.realpath(target)).parents if parent.exists())
    with storage_errors("Looking for free space in", existing):
        return existing, os.statvfs(existing)


def _require_writable(folder: Path, target: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise StorageError(
            f"The export {target} cannot be written: {folder} takes no files ({error.strerror or error}).",
            "Name a path elsewhere.",
        ) from error


@contextmanager
def staged(target: Path, *, keeps_others: bool = False) -> Iterator[Path]:
    """Yield a path at which the body makes a file or folder, which becomes ``target`` when the body ends.

    If the body raises, ``target`` stays as it was. The next export to the same path removes the leftovers of a killed
    process.

    Args:
        target: Path of the export.
        keeps_others: Whether ``target`` may be a folder that is not empty. Its files stay, except for older weights and
            for those that the export has, too.

    Raises:
        StorageLockedError: Another process writes to the same path.
        CheckpointError: ``target`` was made meanwhile, and ``keeps_others`` is false; or the hidden folder holds
            something that this package did not make.
        StorageFullError: The disk is full.
        StorageTimeoutError: The disk does not answer.
        StorageError: The folder cannot be written.
    """
    place = Path(os.path.realpath(target))
    staging = beside(place)
    room = staging / uuid.uuid4().hex
    new = room / place.name
    with storage_errors("Writing the export", target), locked(staging, target) as lock:
        lock.leaves_content = True  # it may hold the export that a killed process was replacing
        limited("Preparing", target, _begin, staging, room, place)
        lock.leaves_content = False
        if not keeps_others:
            require_unused(target)
        try:
            yield new
            doing = "Replacing" if keeps_others else "Making"
            limited(doing, target, _put, new, place, target, keeps_others=keeps_others)
        finally:
            with suppress(StorageTimeoutError):
                limited("Looking at", target, put_back, room, place)


def _begin(staging: Path, room: Path, place: Path) -> None:
    for earlier in (staging, *rooms_in(staging)):  # older versions had no rooms
        put_back(earlier, place)
    remove_content(staging)
    room.mkdir()


def _put(new: Path, place: Path, target: Path, *, keeps_others: bool) -> None:
    if keeps_others and place.is_dir():
        link_others(place, new, replaced=_OLDER_WEIGHTS)
    flush_tree(new)
    if not keeps_others:
        require_unused(target)  # another program may have made it meanwhile
    with doing_now("Renaming", new):
        put_in_place(new, place)
    flush_names(place)
