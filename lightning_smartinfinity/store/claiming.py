"""Locks a rank's folders in all storage folders, and fills them with the files of a new store."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from lightning_smartinfinity.checks import require_distinct
from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.store.folders import (
    COMMIT_NAME,
    STATE_NAME,
    RankFolder,
    rank_folder_path,
    set_aside_path,
)
from lightning_smartinfinity.store.leftovers import is_resumable, resumable_record, resumable_step
from lightning_smartinfinity.store.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.record import record_bytes
from lightning_smartinfinity.store.replacement import flush_names
from lightning_smartinfinity.store.training_record import TrainingRecord

__all__ = ["claim_folders", "clear_folders", "fill_folders"]

_OF_RANK = re.compile(r"rank-[0-9]{5,}")

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


def clear_folders(folders: Sequence[RankFolder], *, rank: int, world_size: int) -> None:
    """Make room for a new store: set a leftover aside whose training has taken a step, and delete another one.

    What was set aside before is replaced. With the leftover of more ranks, each rank looks after some of the others.

    Args:
        folders: The rank's locked folders, one in every storage folder.
        rank: Rank of this process.
        world_size: Number of processes.

    Raises:
        StorageError: A store there is marked ``keep``, or the one that was set aside before is; a leftover to set aside
            lies in further storage folders; or something lies there that this package did not make. Nothing was moved.
    """
    for folder in folders:
        folder.refuse_kept()
    path = folders[0].path
    record, replaced = _resumable(folders[0]), resumable_step(set_aside_path(path))
    if record is not None:
        _require_whole(folders, record.step)
        for folder in folders:
            _refuse_kept(set_aside_path(folder.path))
    absent = [one for folder in folders for one in _of_absent_ranks(folder.path, rank=rank, world_size=world_size)]
    resumable = [one for one in absent if is_resumable(one)]
    for folder in folders:
        if record is None:
            folder.remove_leftover()
        else:
            folder.set_aside()
            _remove_absent(set_aside_path(folder.path), rank=rank, world_size=world_size)
    for one in resumable:
        with suppress(StorageError):  # a process uses it
            other = RankFolder(one, create=False)
            other.set_aside()
            other.discard()
    if record is not None:
        aside, storage = set_aside_path(path).parent.name, path.parents[1]
        _log.warning(
            "%r holds a training that was interrupted after step %d. It was moved to the job %r%s. The next one that is"
            " moved replaces it. To resume it, fit with ckpt_path='storage' and transfer={'job': %r};"
            " to remove it, run: smart-infinity jobs %s --remove %s",
            str(path),
            record.step,
            aside,
            "" if replaced is None else f", and replaced the one there, which was interrupted after step {replaced}",
            aside,
            storage,
            aside,
        )


def _resumable(folder: RankFolder) -> TrainingRecord | None:
    """Return the newest training record of a leftover; None if resuming from it saves no step."""
    with suppress(StorageCorruptError, OSError):
        if folder.inside.status(MANIFEST_NAME) is not None:
            record = resumable_record(folder.inside, read_manifest(folder.inside))
            return record if record is not None and record.has_steps else None
    return None


def _require_whole(folders: Sequence[RankFolder], step: int) -> None:
    """Check that an interrupted training has no parts in further storage folders, from which it would be torn apart."""
    before = read_manifest(folders[0].inside).folders
    if len(before) > len(folders):
        path, job = folders[0].path, folders[0].path.parent.name
        raise StorageError(
            f"{str(path)!r} holds a part of a training that was interrupted after step {step}. It lies in "
            f"{', '.join(map(repr, before))}, of which this one uses {len(folders)}, so it cannot be set aside.",
            "Resume it in these folders with ckpt_path='storage', or remove it, with smart-infinity jobs "
            f"{' '.join(map(str, before))} --remove {job}, or choose another TransferConfig(job=...).",
        )


def _refuse_kept(path: Path) -> None:
    if os.path.lexists(path):
        before = RankFolder(path, create=False)
        try:
            before.refuse_kept()
        finally:
            before.discard()


def _of_absent_ranks(path: Path, *, rank: int, world_size: int) -> list[Path]:
    """Return the folders beside a rank's own that it looks after: of ranks that only a larger training has."""
    with suppress(OSError):
        numbers = {beside: int(beside.name[5:]) for beside in path.parent.iterdir() if _OF_RANK.fullmatch(beside.name)}
        return sorted(one for one, other in numbers.items() if other >= world_size and other % world_size == rank)
    return []


def _remove_absent(path: Path, *, rank: int, world_size: int) -> None:
    for one in _of_absent_ranks(path, rank=rank, world_size=world_size):
        with suppress(StorageError):
            RankFolder(one, create=False).destroy()


def fill_folders(folders: Sequence[RankFolder], manifest: Manifest) -> None:
    """Preallocate the files; the manifest comes last, so that a store with a manifest is complete.

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
        folder.flush()
        with storage_errors("Flushing the folders above", folder.path):
            flush_names(folder.path)
