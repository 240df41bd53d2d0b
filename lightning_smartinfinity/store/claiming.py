"""Locks a rank's folders in all storage folders, and fills them with the files of a new store."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from lightning_smartinfinity.checks import require_distinct
from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.store.folders import (
    COMMIT_NAME,
    STATE_NAME,
    TRAINING_NAMES,
    RankFolder,
    rank_folder_path,
    set_aside_path,
)
from lightning_smartinfinity.store.leftovers import resumable_record
from lightning_smartinfinity.store.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.record import record_bytes
from lightning_smartinfinity.store.replacement import flush_names
from lightning_smartinfinity.store.training_record import TrainingRecord

__all__ = ["claim_folders", "clear_folders", "fill_folders"]

_log = logging.getLogger(__name__)


def claim_folders(folders: Sequence[Path], *, job: str, rank: int, create: bool, undo: ExitStack) -> list[RankFolder]:
    """Lock the rank's folder in every storage folder.

    Args:
        folders: Storage folders.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        create: Whether to create missing folders.
        undo: Receives callbacks that unlock the folders and remove what was created.

    Raises:
        ConfigError: A folder is named twice.
        StorageLockedError: Another process owns one of the folders.
        StorageError: A folder cannot be used or does not exist.
    """
    require_distinct(f"The list of storage folders {[str(folder) for folder in folders]!r}", folders)
    claimed = []
    for folder in folders:
        # Absolute: the process may change its working directory before it removes the folder.
        path = rank_folder_path(Path(os.path.abspath(folder)), job=job, rank=rank)
        if not create and not os.path.lexists(path):
            raise StorageError(
                f"There is no optimizer state in {str(path)!r}.", "Check the storage folder and the job."
            )
        claimed.append(RankFolder(path, create=create))
        undo.callback(claimed[-1].discard)
    return claimed


def clear_folders(folders: Sequence[RankFolder]) -> None:
    """Make room for a new store: set a leftover aside that a training can resume from, and delete another one.

    Args:
        folders: The rank's locked folders, one in every storage folder.

    Raises:
        StorageError: A store there is marked ``keep``, or something lies there that this package did not make.
    """
    for folder in folders:
        folder.refuse_kept()
    record = _resumable(folders[0])
    for folder in folders:
        if record is None:
            folder.remove_leftover()
        else:
            folder.set_aside()
    if record is not None:
        path = folders[0].path
        aside, storage = set_aside_path(path).parent.name, path.parents[1]
        _log.warning(
            "%r holds a training that was interrupted after step %d. It was moved to the job %r. To resume it, fit with"
            " ckpt_path='storage' and transfer={'job': %r, 'keep': 'on-failure'};"
            " to remove it, run: smart-infinity jobs %s --remove %s",
            str(path),
            record.step,
            aside,
            aside,
            storage,
            aside,
        )


def _resumable(folder: RankFolder) -> TrainingRecord | None:
    """Return the newest training record of a leftover; None if no training can resume from it."""
    with suppress(StorageCorruptError, OSError):
        if folder.inside.status(MANIFEST_NAME) is not None:
            return resumable_record(folder.inside, read_manifest(folder.inside))
    return None


def fill_folders(folders: Sequence[RankFolder], manifest: Manifest, *, resumable: bool = False) -> None:
    """Preallocate the files; the manifest comes last, so that a store with a manifest is complete.

    Raises:
        StorageFullError: There is too little space.
        StorageError: A file cannot be created.
    """
    for device, folder in enumerate(folders):
        folder.allocate(STATE_NAME, manifest.extents.file_bytes(device))
    num_parameters = len(manifest.description.parameters)
    folders[0].allocate(COMMIT_NAME, 2 * record_bytes(manifest.extents.num_tasklets, num_parameters))
    for name in TRAINING_NAMES if resumable else ():
        folders[0].allocate(name, 0)
    for device, folder in enumerate(folders):
        folder.write_manifest(manifest.for_device(device))
        folder.flush()
        with storage_errors("Flushing the folders above", folder.path):
            flush_names(folder.path)
