"""Looks at what an earlier process has left in a rank's folder, and whether a training can go on from it."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.store.folders import open_rank_folder, owned_names, set_aside_path
from lightning_smartinfinity.store.lock import KEPT, is_locked, read_lock
from lightning_smartinfinity.store.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_smartinfinity.store.open_folder import OpenFolder
from lightning_smartinfinity.store.recovery import records_of, written_records
from lightning_smartinfinity.store.training_record import TrainingRecord

__all__ = ["is_resumable", "leftover_bytes", "resumable_record", "resumable_step"]


def resumable_record(folder: OpenFolder, manifest: Manifest) -> TrainingRecord | None:
    """Return the newest training record in a rank's first folder whose generation is committed, or None.

    Neither extents nor residuals are read.

    Raises:
        StorageError: A record cannot be read.
    """
    committed = {record.generation for record in records_of(folder, manifest).intact}
    found = written_records(folder, manifest)
    return next((record for record in found if record.generation in committed), None)


def resumable_step(path: Path) -> int | None:
    """Return the step after which a training can resume from the store in a rank's first folder, or None."""
    with suppress(OSError, StorageError), closing(open_rank_folder(path)) as folder:
        record = resumable_record(folder, read_manifest(folder))
        return None if record is None else record.step
    return None


def is_resumable(path: Path) -> bool:
    """Return whether a rank's folder holds a leftover that a new store sets aside."""
    return _leftover(path)[1]


def leftover_bytes(path: Path) -> tuple[int, int]:
    """Return the bytes allocated by the leftovers that a new store in this rank's folder deletes, and sets aside.

    It deletes the store there, or, if a training can resume from it, the one that was set aside before.
    """
    nbytes, resumable = _leftover(path)
    return (_leftover(set_aside_path(path))[0], nbytes) if resumable else (nbytes, 0)


def _leftover(path: Path) -> tuple[int, bool]:
    """Return the bytes of a store that may be deleted, and whether a training with steps can resume from it."""
    try:
        with closing(open_rank_folder(path)) as folder:
            notes: frozenset[str] = frozenset()
            with suppress(StorageCorruptError):  # then the manifest says whether it is a leftover
                _, notes = read_lock(folder)
            manifest = None if folder.status(MANIFEST_NAME) is None else read_manifest(folder)
            if is_locked(folder) or KEPT in notes or (manifest is not None and manifest.keep):
                return 0, False
            sizes = map(folder.status, owned_names(folder, notes, manifest))
            nbytes = sum(status.st_blocks * 512 for status in sizes if status is not None)
            return nbytes, manifest is not None and _is_resumable(folder, manifest)
    except (OSError, StorageError):
        return 0, False


def _is_resumable(folder: OpenFolder, manifest: Manifest) -> bool:
    # Only the first folder has records: the others are as good as it, whose name the manifest has.
    if manifest.device == 0:
        record = resumable_record(folder, manifest)
    else:
        job, rank = folder.path.parent.name, folder.path.name
        with closing(open_rank_folder(Path(manifest.folders[0]) / job / rank)) as first:
            record = resumable_record(first, read_manifest(first))
    return record is not None and record.has_steps
