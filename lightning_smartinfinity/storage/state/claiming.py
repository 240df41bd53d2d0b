"""Locks a rank's folders in all storage folders, and fills them with the files of a new store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.settings.rules import require_distinct
from lightning_smartinfinity.storage.folders.manifest import Manifest
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME, STATE_NAME, RankFolder, rank_folder_path
from lightning_smartinfinity.storage.folders.replacement import flush_names
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.state.commit_record import record_bytes

__all__ = ["claim_folders", "clear_folders", "fill_folders"]


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
                f"There is no optimizer state in {str(path)!r}.",
                "Check the storage folder and the job, or leave ckpt_path out to begin anew. If another machine has "
                "that folder, start the machines in the order of before, or copy it here (cp -r).",
            )
        claimed.append(RankFolder(path, create=create))
        undo.callback(claimed[-1].discard)
    return claimed


def clear_folders(folders: Sequence[RankFolder]) -> None:
    """Delete the leftover of an earlier process; callers set a training that can be resumed aside first.

    Raises:
        StorageError: A store there is marked ``keep``, and nothing was deleted; or this package did not make a file
            that is in the way, or a file cannot be deleted.
    """
    for folder in folders:
        folder.refuse_kept()
    for folder in folders:
        folder.remove_leftover()


def fill_folders(folders: Sequence[RankFolder], manifest: Manifest) -> None:
    """Preallocate the files, and write the manifests last, so that a store with a manifest is complete.

    Raises:
        StorageFullError: There is too little space.
        StorageError: A file cannot be created.
    """
    for device, folder in enumerate(folders):
        folder.allocate(STATE_NAME, manifest.extents.file_bytes(device))
    num_parameters = len(manifest.description.parameters)
    folders[0].allocate(COMMIT_NAME, 2 * record_bytes(manifest.extents.num_tasklets, num_parameters))
    for device, folder in enumerate(folders):
        folder.write_manifest(manifest.for_device(device))
        with storage_errors("Flushing the folders above", folder.path):
            flush_names(folder.path)
