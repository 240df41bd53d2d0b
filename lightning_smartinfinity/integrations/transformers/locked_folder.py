"""A temporary folder that is locked while it is in use, so that one left by a killed process can be removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from lightning_smartinfinity.storage.folders.lock import try_lock

__all__ = ["LockedFolder"]

_PREFIX = "smart-infinity-resume-"


class LockedFolder:
    """A new temporary folder. Folders of this kind that killed processes have left are removed first.

    Args:
        *names: Names of the files that the folder is for. A folder that holds another file is not removed.

    Attributes:
        path: The folder.
    """

    def __init__(self, *names: str) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another user's, locked, or just removed by another process
                _remove_unlocked(left, names)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            with suppress(FileNotFoundError):  # another process has removed it before it was locked
                self._descriptor: int | None = _open(self.path)
                with suppress(OSError):  # the file system has no locks
                    try_lock(self._descriptor)
                if self.path.is_dir():
                    return
                os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the folder with its files; idempotent."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None


def _remove_unlocked(folder: Path, names: tuple[str, ...]) -> None:
    """Remove a folder and these files in it, unless it is locked. Raises OSError if it has another file."""
    descriptor = _open(folder)
    try:
        if try_lock(descriptor):
            for name in names:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
