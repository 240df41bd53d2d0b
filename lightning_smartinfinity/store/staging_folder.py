"""Folders in which something is written until it is complete. Only those that this package made are ever removed.

A staging folder holds a file with its own name, its mark. The mark is made first and removed last, so a folder that has
something else, but no mark, is somebody else's, whenever a process was killed.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from lightning_smartinfinity.errors import CheckpointError, StorageTimeoutError
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.store.replacement import flush

__all__ = [
    "make_staging",
    "mark_of",
    "remove_content",
    "remove_staging",
    "remove_staging_unless_idle",
    "require_own_staging",
]


def mark_of(staging: Path) -> Path:
    """Return the path of a staging folder's mark."""
    return staging / staging.name  # no target has this name


def foreign_in(staging: Path) -> Path | None:
    """Return what lies at the path of a staging folder, or in it, that this package did not make, if anything does."""
    try:
        names = os.listdir(staging)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return staging
    if staging.is_symlink():
        return staging
    return None if not names or staging.name in names else staging / min(names)


def require_own_staging(staging: Path) -> None:
    """Check that nothing is lost if a staging folder is removed.

    Raises:
        CheckpointError: Something lies there that this package did not make.
        OSError: The folder cannot be read.
    """
    foreign = foreign_in(staging)
    if foreign is not None:
        raise CheckpointError(
            f"{foreign} is in the way: {staging} is where a new save is written, and this package did not make it.",
            "Move it elsewhere, or save to another path.",
        )


def make_staging(staging: Path) -> None:
    """Make a staging folder, unless there is one.

    Raises:
        OSError: It cannot be made.
        StorageTimeoutError: The disk does not answer.
    """
    staging.mkdir(parents=True, exist_ok=True)
    mark_of(staging).touch()
    flush(staging)  # some file systems would have what is flushed below it after a power loss, and not the mark


def remove_staging(staging: Path) -> None:
    """Remove a staging folder with all that is in it, as far as possible; one of somebody else stays."""
    with suppress(OSError):
        if foreign_in(staging) is None:
            remove_content(staging)
            if os.listdir(staging) == [staging.name]:
                mark_of(staging).unlink()
            staging.rmdir()


def remove_staging_unless_idle(staging: Path) -> None:
    """Act as :func:`remove_staging`, and not on a disk that does not answer."""
    with suppress(StorageTimeoutError):
        unless_idle(partial(remove_staging, staging), doing="Removing", path=staging)


def remove_content(staging: Path) -> None:
    """Remove what lies in a staging folder beside its mark, as far as possible."""
    with suppress(OSError):
        for entry in staging.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry != mark_of(staging):
                entry.unlink()
