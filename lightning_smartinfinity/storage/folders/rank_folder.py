"""Creates, locks, fills and removes a rank's folder in one storage folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.storage.folders.lock import LOCK_NAME, FolderLock, reading, remove_unlocked
from lightning_smartinfinity.storage.folders.lock_content import ARCHIVED, KEPT, REMOVED, SUCCESSOR
from lightning_smartinfinity.storage.folders.manifest import MANIFEST_NAME, Manifest, manifest_content, read_manifest
from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE, OpenFolder, Trust
from lightning_smartinfinity.storage.folders.replacement import flush, flush_names
from lightning_smartinfinity.storage.io.files import unless_removed
from lightning_smartinfinity.storage.io.os_errors import storage_errors

__all__ = [
    "COMMIT_NAME",
    "OUR_NAMES",
    "RESIDUAL_NAMES",
    "STATE_NAME",
    "TRAINING_NAMES",
    "RankFolder",
    "in_job_folder",
    "open_rank_folder",
    "owned_names",
    "rank_folder_path",
    "read_rank_folder",
]

STATE_NAME = "state.bin"
COMMIT_NAME = "commit.bin"
TRAINING_NAMES = ("training-0.bin", "training-1.bin")
RESIDUAL_NAMES = ("residual-0.bin", "residual-1.bin")
_NEW = ".new"  # suffix of a file that will replace another one, until it is complete
_TRAINING_NAMES = (*(name + _NEW for name in TRAINING_NAMES), *TRAINING_NAMES)
_RECORD_NAMES = (COMMIT_NAME, *_TRAINING_NAMES, *RESIDUAL_NAMES)
_PROOFS = (*_TRAINING_NAMES, MANIFEST_NAME)
OUR_NAMES = (*_PROOFS, MANIFEST_NAME + _NEW, STATE_NAME, COMMIT_NAME, *RESIDUAL_NAMES)
"""Names of the files in a rank's folder, except its lock, in the order in which a store is deleted.

Without training records of steps, what a kill leaves is not taken for a training whose other files were lost. Only the
first folder has records.
"""

_ARCHIVED = re.compile(rf"({re.escape(MANIFEST_NAME)}|{LOCK_NAME})\.[0-9]+{re.escape(ARCHIVE)}")

_REMEMBERED = 2.0  # seconds; FUSE and SMB cache for 1, NFS for 60: not so long, since a wrong path must fail soon

T = TypeVar("T")


def rank_folder_path(storage: Path, *, job: str, rank: int) -> Path:
    """Return ``<storage>/<job>/rank-<n>``."""
    return storage / job / f"rank-{rank:05d}"


def open_rank_folder(path: Path, *, trust: Trust = Trust.OWN) -> OpenFolder:
    """Open ``<storage>/<job>/<folder>``. Links are followed on the way to the storage folder, but not below it.

    Raises:
        StorageError: The job's folder or the folder in it is a link, or not trusted.
        OSError: A folder cannot be opened.
    """
    above = _open_storage(path.parents[1])
    try:
        with closing(OpenFolder(path.parent, parent=above, trust=trust)) as job:
            return OpenFolder(path, parent=job.descriptor, trust=trust)
    finally:
        os.close(above)


@contextmanager
def read_rank_folder(path: Path) -> Iterator[OpenFolder]:
    """Open a rank's folder for reading, and keep other processes from using it meanwhile. Nothing there is written.

    Raises:
        StorageLockedError: A process owns the folder.
        StorageError: The folder does not exist, or is not trusted.
    """
    with ExitStack() as opened:
        with storage_errors("Opening the folder", path):
            folder = opened.enter_context(closing(open_rank_folder(path)))
            opened.enter_context(reading(folder))
        yield folder


def owned_names(folder: OpenFolder, notes: Iterable[str], manifest: Manifest | None) -> set[str]:
    """Return the names of a store's own files. Only these may be deleted: other users may have files there, too.

    Args:
        folder: The rank's folder.
        notes: The notes of its lock.
        manifest: Its manifest, if there is one.
    """
    owned = set(notes)
    if manifest is not None:
        owned |= {STATE_NAME, MANIFEST_NAME}
        if manifest.device == 0:
            owned |= set(_RECORD_NAMES)
    return owned.intersection(OUR_NAMES, folder.names())


class RankFolder:
    """A locked rank folder. Files of an earlier store stay there until :meth:`remove_leftover`.

    Args:
        path: Path of the folder, see :func:`rank_folder_path`.
        create: Whether to create the folder and its parents where missing.

    Raises:
        StorageLockedError: Another process owns the folder.
        StorageError: The folder cannot be created, is not trusted, or (without ``create``) does not exist.

    Attributes:
        path: Path of the folder.
        inside: The open folder, for access to its files.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self._made_folders: list[Path] = []
        self._made_files: list[str] = []
        try:
            with storage_errors("Creating the folder" if create else "Opening the folder", path):
                self.inside = unless_removed(self._make, seconds=_REMEMBERED) if create else open_rank_folder(path)
            self._lock = FolderLock(self.inside, leftover=self._holds_leftover)
        except BaseException:
            self._remove_made_folders()
            raise

    def refuse_kept(self) -> None:
        """Check that the folder holds no store that a later job must leave alone.

        Raises:
            StorageError: The store there is marked ``keep``, or this package did not make the manifest there.
        """
        manifest = self._earlier_manifest()
        if KEPT in self._lock.notes or (manifest is not None and manifest.keep):
            raise StorageError(
                f"{str(self.path)!r} holds the optimizer state of an earlier job that asked to keep it.",
                "Remove that folder if it is no longer needed, or choose another TransferConfig(job=...).",
            )

    def is_kept(self) -> bool:
        """Return whether the store there is marked ``keep``; a damaged manifest does not count.

        Raises:
            StorageError: The manifest cannot be read, is not trusted, or is of a newer version of this package.
        """
        if KEPT in self._lock.notes:
            return True
        with suppress(StorageCorruptError):
            manifest = self._earlier_manifest()
            return manifest is not None and manifest.keep
        return False

    def remove_leftover(self) -> None:
        """Delete the store of an earlier process, if there is one.

        Raises:
            StorageCorruptError: Its manifest is damaged, so the store may still be needed.
            StorageError: This package did not make a file that is in the way, or a file cannot be deleted.
        """
        manifest = self._earlier_manifest()
        with storage_errors("Removing the leftover of an earlier job in", self.path):
            owned = owned_names(self.inside, self._lock.notes, manifest)
            self._refuse_foreign(owned)
            if owned:
                self._lock.note(REMOVED)
            for name in OUR_NAMES:
                if name in owned:
                    self.inside.remove(name)
            self._lock.erase()

    def mark_archived(self, *, successor: bytes | None = None) -> None:
        """Mark the store there as archived, to be replaced by the next one archived. :meth:`adopt` erases the mark.

        Args:
            successor: Job id of the stores that are to be filled from it, if there are any.

        Raises:
            StorageError: The lock cannot be written.
        """
        if successor is None:
            self._lock.note(ARCHIVED)
        else:
            self._forget_end()
            self._lock.note(ARCHIVED, f"{SUCCESSOR}{successor.hex()}")

    def _forget_end(self) -> None:
        notes = [note for note in self._lock.notes if note in (ARCHIVED, REMOVED) or note.startswith(SUCCESSOR)]
        if notes:
            self._lock.erase(*notes)

    def note_checkpoint(self, path: str, *, step: int) -> None:
        """Note which checkpoint of the training is the newest one, for when a part of the state is lost.

        Raises:
            StorageError: The lock cannot be written.
        """
        self._lock.note_checkpoint(path, step=step)

    def make_job(self, job: str) -> None:
        """Make the folder of another job in the same storage folder if it is missing, for :meth:`move`.

        Raises:
            StorageError: It cannot be made, or is not trusted.
        """
        path = self.path.parents[1] / job
        with storage_errors("Creating the folder", path), closing(_make_job_folder(path, self._made_folders)):
            return

    def move(self, job: str) -> None:
        """Move the folder with all its content to another job in the same storage folder, and unlock it.

        Raises:
            StorageError: It cannot be moved.
        """
        target = self.path.parents[1] / job / self.path.name
        with storage_errors(f"Moving to the job {job!r} the folder", self.path):
            with closing(_make_job_folder(target.parent, self._made_folders)) as folder:
                os.rename(self.path, target.name, dst_dir_fd=folder.descriptor)
            flush_names(target)
            with suppress(FileNotFoundError):  # another rank moved the last folder, and removed the job's
                flush(self.path.parent)
        self._made_folders.clear()  # the job's folder is not empty
        self._lock.release(remove=False)
        self.inside.close()
        _remove_folders_quietly([self.path.parent])

    def adopt(self, manifest: Manifest) -> None:
        """Take over the store of an earlier process to continue it. From then on, :meth:`close` may delete it.

        Raises:
            StorageError: The lock cannot be written.
        """
        self._lock.note(*owned_names(self.inside, (), manifest))
        self._forget_end()

    def allocate(self, name: str, num_bytes: int) -> Path:
        """Create a file whose blocks are all reserved and read as zeros.

        Raises:
            StorageFullError: There is too little space.
            StorageError: The file cannot be created.
        """
        path = self.path / name
        with storage_errors(f"Allocating {num_bytes} bytes for", path):
            self._expect(name)
            descriptor = self.inside.create(name)
            try:
                if num_bytes:
                    os.posix_fallocate(descriptor, 0, num_bytes)
            finally:
                os.close(descriptor)
        return path

    def allocate_missing(self, *names: str, num_bytes: int = 0) -> None:
        """Create files of this size where they do not exist, and flush them. Raises as :meth:`allocate`."""
        with storage_errors("Looking for files in", self.path):
            missing = [name for name in names if self.inside.status(name) is None]
        for name in missing:
            with storage_errors("Flushing", self.allocate(name, num_bytes)):
                descriptor = self.inside.open(name, os.O_RDWR)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        if missing:
            self.flush()

    def extend(self, name: str, num_bytes: int) -> None:
        """Extend a file, with all its blocks reserved; its length stays as it is if that fails.

        Raises:
            StorageFullError: There is too little space.
            StorageError: The file cannot be extended.
        """
        path = self.path / name
        with storage_errors(f"Extending to {num_bytes} bytes", path):
            descriptor = self.inside.open(name, os.O_RDWR)
            try:
                before = os.fstat(descriptor).st_size
                try:
                    os.posix_fallocate(descriptor, before, num_bytes - before)
                except OSError:
                    os.ftruncate(descriptor, before)
                    raise
            finally:
                os.close(descriptor)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest atomically: a reader sees the old one, the new one, or no file.

        Raises:
            StorageError: It could not be written; no temporary file is left.
        """
        with storage_errors("Writing", self.path / MANIFEST_NAME):
            self._expect(MANIFEST_NAME)
            if manifest.keep:
                self._lock.note(KEPT)
        self.replace(MANIFEST_NAME, manifest_content(manifest), flush=True)

    def replace(self, name: str, content: bytes, *, flush: bool) -> None:
        """Write a file atomically: a reader sees the old content, the new one, or no file.

        Args:
            name: Name of the file.
            content: Its content.
            flush: Whether to flush content and name, so that they survive a power loss.

        Raises:
            StorageError: It could not be written; no temporary file is left.
        """
        temporary = name + _NEW
        with storage_errors("Writing", self.path / name):
            if temporary in self._lock.notes:
                self.inside.remove(temporary)  # a process was killed while it wrote the file
            self._expect(name, temporary)
            self.inside.replace(name, content, temporary=temporary, flush=flush)
            if flush:
                self.inside.flush()

    def size_of(self, name: str) -> int:
        """Return the length of a file.

        Raises:
            StorageError: There is no such file.
        """
        with storage_errors("Reading the length of", self.path / name):
            return os.stat(name, dir_fd=self.inside.descriptor, follow_symlinks=False).st_size

    def flush(self) -> None:
        """Flush the folder's entries, so that they survive a power loss."""
        with storage_errors("Flushing", self.path):
            self.inside.flush()

    def discard(self) -> None:
        """Remove what this object created, and unlock. Never raises."""
        self._remove_quietly(self._made_files)
        # Listing a folder needs a descriptor, which may be unavailable: a folder made here is not listed.
        self._lock.release(remove=self.path in self._made_folders or self._holds_nothing())
        self.inside.close()
        self._remove_made_folders()

    def destroy(self) -> None:
        """Delete the store there, its files that were archived, and the folders if they are then empty; unlock.

        A folder that has the name of one of these files stays.

        Raises:
            StorageError: A file cannot be deleted.
        """
        with storage_errors("Removing", self.path):
            owned = set[str]()
            if self.inside.status(MANIFEST_NAME) is not None:
                with suppress(StorageCorruptError):  # a damaged manifest is deleted if the lock names it
                    owned = owned_names(self.inside, (), read_manifest(self.inside))
            self._lock.note(REMOVED, *owned)
            archived = filter(_ARCHIVED.fullmatch, self.inside.names())
            for name in (*(name for name in OUR_NAMES if name in self._lock.notes), *archived):
                with suppress(IsADirectoryError):  # not made by this package
                    self.inside.remove(name)
        self.close(remove=True)

    def disown(self) -> None:
        """Delete training records and manifest, without which the other files are not a store. Never raises."""
        self._note_removal()
        self._remove_quietly(name for name in _PROOFS if name in self._lock.notes)

    def close(self, *, remove: bool) -> None:
        """Unlock; idempotent.

        Args:
            remove: Whether to delete the store and, if they are then empty, the rank's and the job's folder.
        """
        if remove:
            self._note_removal()
            self._remove_quietly([name for name in OUR_NAMES if name in self._lock.notes])
        self._lock.release(remove=remove)
        self.inside.close()
        if remove:
            _remove_folders_quietly([self.path, self.path.parent])

    def _make(self) -> OpenFolder:
        with closing(_make_job_folder(self.path.parent, self._made_folders)) as job:
            return _make_below(self.path, job.descriptor, self._made_folders)

    def _earlier_manifest(self) -> Manifest | None:
        """Return the manifest of an earlier store; None if it is missing.

        Raises:
            StorageCorruptError: It is damaged.
            StorageError: It cannot be read, is not trusted, or is of a newer version of this package.
        """
        with storage_errors("Reading", self.path / MANIFEST_NAME):
            if self.inside.status(MANIFEST_NAME) is None:
                return None
        return read_manifest(self.inside)

    def _holds_leftover(self) -> bool:
        """Return whether a readable manifest shows that the store there need not be kept."""
        with suppress(OSError, StorageError):
            return not read_manifest(self.inside).keep
        return False

    def _refuse_foreign(self, owned: Iterable[str]) -> None:
        for name in OUR_NAMES:
            if self.inside.status(name) is not None and name not in owned:
                raise StorageError(
                    f"{str(self.path / name)!r} is in the way: neither a manifest nor the lock there names it.",
                    "Remove it if it is no longer needed, or choose another TransferConfig(job=...).",
                )

    def _expect(self, *names: str) -> None:
        """Note that files are about to be made, so that :meth:`discard`, or a later process, deletes them."""
        for name in names:
            if name not in self._lock.notes and self.inside.status(name) is not None:
                self._refuse_foreign(self._lock.notes)
        self._made_files.extend(names)
        self._lock.note(*names)

    def _note_removal(self) -> None:
        with suppress(StorageError):
            self._lock.note(REMOVED)

    def _remove_quietly(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                self.inside.remove(name)

    def _holds_nothing(self) -> bool:
        """Return whether there is only a lock, which does not name lost training records."""
        if self._lock.notes.issuperset(TRAINING_NAMES) and REMOVED not in self._lock.notes:
            return False
        try:
            return len(self.inside.names()) == 1
        except OSError:
            return False

    def _remove_made_folders(self) -> None:
        _remove_folders_quietly(reversed(self._made_folders))


def in_job_folder(path: Path, make: Callable[[OpenFolder], T]) -> T:
    """Make something unnamed in a job's folder, and return it. The job's folder is removed again if it is empty.

    Args:
        path: ``<storage>/<job>``, which is made where missing.
        make: Function that is called with the open folder.

    Raises:
        StorageError: The folder is a link, or not trusted.
        OSError: The folder cannot be made.
    """
    made: list[Path] = []

    def make_once() -> T:
        with closing(_make_job_folder(path, made)) as folder:
            return make(folder)

    try:
        result = unless_removed(make_once, seconds=_REMEMBERED)
    except BaseException:
        _remove_folders_quietly(reversed(made))
        raise
    with suppress(OSError):  # it holds the state of a rank
        os.rmdir(path)
    return result


def _make_job_folder(path: Path, made: list[Path]) -> OpenFolder:
    """Open ``<storage>/<job>``. Missing folders on the path are made and added to ``made``."""
    try:
        return _make_all(path, made)
    except FileNotFoundError:
        _refuse_dangling(path.parent)
        raise


def _make_all(path: Path, made: list[Path]) -> OpenFolder:
    storage = path.parent
    missing = [folder for folder in (storage, *storage.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder)
            made.append(folder)
    above = _open_storage(storage)
    try:
        return _make_below(path, above, made)
    finally:
        os.close(above)


def _make_below(path: Path, parent: int, made: list[Path]) -> OpenFolder:
    try:
        os.mkdir(path.name, 0o700, dir_fd=parent)
    except FileExistsError:
        return OpenFolder(path, parent=parent)
    made.append(path)
    return OpenFolder(path, parent=parent, trust=Trust.MADE)


def _open_storage(path: Path) -> int:
    """Open a storage folder, which may be a link, of any owner and unreadable: only folders below it are ours."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _refuse_dangling(storage: Path) -> None:
    for path in (storage, *storage.parents):
        if path.is_symlink() and not path.exists():
            raise StorageError(
                f"{str(path)!r} is a symbolic link to {os.readlink(path)!r}, which does not exist.",
                "Mount or make that folder, or name another storage folder.",
            )


def _remove_folders_quietly(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            remove_unlocked(folder)
        except OSError:
            # The folder holds files of another rank or of the user.
            return
