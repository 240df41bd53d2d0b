"""Creates, locks, fills and removes a rank's folder in one storage folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.store.lock import FolderLock, is_locked
from lightning_smartinfinity.store.manifest import MANIFEST_NAME, read_manifest
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.replacement import flush

__all__ = [
    "COMMIT_NAME",
    "PARAMETERS_NAME",
    "STATE_NAME",
    "RankFolder",
    "parameter_folder_path",
    "rank_folder_path",
    "reclaimable_bytes",
]

STATE_NAME = "state.bin"
COMMIT_NAME = "commit.bin"
PARAMETERS_NAME = "parameters.bin"
_OUR_NAMES = (STATE_NAME, COMMIT_NAME, MANIFEST_NAME, PARAMETERS_NAME)
_MAKE_ATTEMPTS = 16


def rank_folder_path(storage: Path, *, job: str, rank: int) -> Path:
    """Return ``<storage>/<job>/rank-<n>``."""
    return storage / job / f"rank-{rank:05d}"


def parameter_folder_path(storage: Path, *, job: str, rank: int) -> Path:
    """Return ``<storage>/<job>/parameters-<n>``: parameters are stored before the state, and may outlive it."""
    return storage / job / f"parameters-{rank:05d}"


def reclaimable_bytes(path: Path) -> int:
    """Return the bytes allocated by a leftover store that :meth:`RankFolder.remove_leftover` would delete."""
    try:
        if is_locked(path) or ((path / MANIFEST_NAME).exists() and read_manifest(path / MANIFEST_NAME).keep):
            return 0
        return sum((path / name).stat().st_blocks * 512 for name in _OUR_NAMES if (path / name).exists())
    except (OSError, StorageError):
        return 0


class RankFolder:
    """A locked rank folder. Files of an earlier store stay there until :meth:`remove_leftover`.

    Args:
        path: Path of the folder, see :func:`rank_folder_path`.
        create: Whether to create the folder and its parents where missing.

    Raises:
        StorageLockedError: Another process owns the folder.
        StorageError: The folder cannot be created, or (without ``create``) does not exist.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self._made_folders: list[Path] = []
        self._made_files: list[Path] = []
        try:
            if create:
                with storage_errors("Creating the folder", path):
                    self._make_folders()
            self._lock = FolderLock(path)
        except BaseException:
            self._remove_made_folders()
            raise

    def refuse_kept(self) -> None:
        """Check that the folder holds no store that a later job must leave alone.

        Raises:
            StorageError: The store there is marked ``keep``, or its manifest cannot be read.
        """
        manifest = self.path / MANIFEST_NAME
        if manifest.exists() and read_manifest(manifest).keep:
            raise StorageError(
                f"{str(self.path)!r} holds the optimizer state of an earlier job that asked to keep it.",
                "Remove that folder if it is no longer needed, or choose another TransferConfig(job=...).",
            )

    def remove_leftover(self) -> None:
        """Delete the store of an earlier process, if there is one."""
        with storage_errors("Removing the leftover of an earlier job in", self.path):
            for name in _OUR_NAMES:
                (self.path / name).unlink(missing_ok=True)

    def allocate(self, name: str, num_bytes: int) -> Path:
        """Create a file whose blocks are all reserved and read as zeros.

        Raises:
            StorageFullError: There is too little space.
            StorageError: The file cannot be created.
        """
        path = self.path / name
        self.expect(name)
        with storage_errors(f"Allocating {num_bytes} bytes for", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if num_bytes:
                    os.posix_fallocate(descriptor, 0, num_bytes)
            finally:
                os.close(descriptor)
        return path

    def extend(self, name: str, num_bytes: int) -> None:
        """Extend a file, with all its blocks reserved; its length stays as it is if that fails.

        Raises:
            StorageFullError: There is too little space.
            StorageError: The file cannot be extended.
        """
        path = self.path / name
        with storage_errors(f"Extending to {num_bytes} bytes", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                before = os.fstat(descriptor).st_size
                try:
                    os.posix_fallocate(descriptor, before, num_bytes - before)
                except OSError:
                    os.ftruncate(descriptor, before)
                    raise
            finally:
                os.close(descriptor)

    def expect(self, name: str) -> Path:
        """Record that a file is about to be created, so that :meth:`discard` deletes it; return its path."""
        path = self.path / name
        self._made_files.append(path)
        return path

    def flush(self) -> None:
        """Make the folder's entries survive a power loss."""
        with storage_errors("Flushing", self.path):
            flush(self.path)

    def discard(self) -> None:
        """Remove what this object created, and unlock. Never raises."""
        _remove_quietly(self._made_files)
        # Listing a folder needs a descriptor, which may be unavailable: a folder made here is not listed.
        self._lock.release(remove=self.path in self._made_folders or self._holds_only_lock())
        self._remove_made_folders()

    def close(self, *, remove: bool) -> None:
        """Unlock; idempotent.

        Args:
            remove: Whether to delete the store and, if they are then empty, the rank's and the job's folder.
        """
        if remove:
            _remove_quietly([self.path / name for name in _OUR_NAMES])
        self._lock.release(remove=remove)
        if remove:
            _remove_folders_quietly([self.path, self.path.parent])

    def _make_folders(self) -> None:
        # Another rank may remove the job's folder, empty for a moment, between our two mkdir.
        for attempt in range(_MAKE_ATTEMPTS):
            missing = [folder for folder in (self.path, *self.path.parents) if not os.path.lexists(folder)]
            try:
                for folder in reversed(missing):
                    if _make_folder(folder):
                        self._made_folders.append(folder)
                if not self.path.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                return
            except FileNotFoundError:
                if attempt == _MAKE_ATTEMPTS - 1:
                    raise

    def _holds_only_lock(self) -> bool:
        try:
            return len(os.listdir(self.path)) == 1
        except OSError:
            return False

    def _remove_made_folders(self) -> None:
        _remove_folders_quietly(reversed(self._made_folders))


def _make_folder(folder: Path) -> bool:
    try:
        os.mkdir(folder)
    except FileExistsError:
        return False
    return True


def _remove_quietly(files: list[Path]) -> None:
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError:
            continue


def _remove_folders_quietly(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            # The folder holds files of another rank or of the user.
            return
