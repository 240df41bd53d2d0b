"""Creates the store of a training, and opens the store of an earlier process."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.settings import IO_TIMEOUT, TransferConfig
from lightning_smartinfinity.settings.rules import require_distinct
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage.extents import ExtentMap
from lightning_smartinfinity.storage.folders.manifest import MANIFEST_NAME, Manifest, StoreDescription
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME, STATE_NAME, RankFolder, rank_folder_path
from lightning_smartinfinity.storage.folders.replacement import flush_names
from lightning_smartinfinity.storage.io.deadlines import in_time, io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.training_record import TrainingRecord
from lightning_smartinfinity.storage.state.commit_record import no_record, record_bytes
from lightning_smartinfinity.storage.state.lost_parts import refuse_lost, require_present
from lightning_smartinfinity.storage.state.parts import require_files
from lightning_smartinfinity.storage.state.recovery import (
    common_manifest,
    damaged_beside,
    newest_complete,
    require_recoverable,
    usable_records,
    with_whole_residuals,
)
from lightning_smartinfinity.storage.state.space import measure_space, require_space
from lightning_smartinfinity.storage.state.state_store import StateStore

__all__ = [
    "claim_folders",
    "clear_folders",
    "create_store",
    "fill_folders",
    "find_resumable",
    "recover_store",
]


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
        if not create:
            require_present(path, among=folders)
        claimed.append(RankFolder(path, create=create))
        undo.callback(claimed[-1].discard)
    return claimed


def clear_folders(folders: Sequence[RankFolder]) -> None:
    """Delete the leftover of an earlier process; callers archive a training that can be resumed first.

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


def create_store(
    folders: Sequence[Path],
    *,
    config: TransferConfig,
    extents: ExtentMap,
    description: StoreDescription,
    rank: int = 0,
    world_size: int = 1,
    num_machines: int = 1,
    job_id: bytes | None = None,
) -> StateStore:
    """Lock the folders, replace a leftover store and preallocate. On any failure, remove what was created.

    Args:
        folders: Storage folders, created where missing; one state file each.
        config: Job name, durability, direct I/O and keep.
        extents: ``PartitionLayout.extents``, with as many devices as ``folders``.
        description: Optimizer, arrays and parameters, for the manifest.
        rank: Rank of this process.
        world_size: Number of processes.
        num_machines: Number of machines that they run on.
        job_id: 16 bytes common to all ranks; None means random ones.

    Returns:
        A store without a generation: ``TransferHandler.initialize`` commits the first.

    Raises:
        ConfigError: A folder is named twice.
        StorageLockedError: Another process owns one of the folders.
        StorageFullError: There is too little space.
        StorageTimeoutError: A disk does not answer.
        StorageError: A folder cannot be used, holds a store marked ``keep``, or has no direct I/O under ``"on"``.
    """
    assert len(folders) == extents.num_devices and config.places_per_tasklet == extents.places_per_tasklet
    manifest = Manifest(
        job=job_id or uuid.uuid4().bytes,
        rank=rank,
        world_size=world_size,
        num_machines=num_machines,
        durability=config.manifest_durability,
        keep=config.keep is True,
        extents=extents,
        description=description,
        folders=tuple(os.path.abspath(folder) for folder in folders),
    )

    def make() -> StateStore:
        with ExitStack() as undo:
            claimed = claim_folders(folders, job=config.job, rank=rank, create=True, undo=undo)
            clear_folders(claimed)
            require_space(
                measure_space(
                    folders, job=config.job, rank=rank, extents=extents, num_parameters=len(description.parameters)
                )
            )
            fill_folders(claimed, manifest)
            record = no_record(extents.num_tasklets, len(description.parameters))
            store = StateStore(
                claimed,
                manifest,
                record,
                direct_io=config.file_access,
                io_engine=config.io_engine,
                io_timeout=config.io_timeout,
            )
            undo.pop_all()
            return store

    return _opened(make, folders, "Creating the store", seconds=config.io_timeout, remove=True)


def recover_store(
    folders: Sequence[Path],
    *,
    job: str = "default",
    rank: int = 0,
    newest: int | None = None,
    training: int | None = None,
    run: bytes | None = None,
    direct_io: str = "auto",
    io_engine: str = "auto",
    state_format: str | None = None,
    io_timeout: float = IO_TIMEOUT,
) -> StateStore:
    """Open the store of an earlier process at its newest complete generation; newer records are erased.

    Args:
        folders: The folders given to :func:`create_store`, in the same order.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        newest: Largest generation to open (the newest common to all ranks); None means any.
        training: Number of the training record to resume from; a newer one is erased. None to resume from none.
        run: ``TrainingRecord.run`` of the records that follow, the same on all ranks; None means a random one.
        direct_io: ``TransferConfig.direct_io``.
        io_engine: ``TransferConfig.io_engine``.
        state_format: The required format; None means any.
        io_timeout: ``TransferConfig.io_timeout``.

    Raises:
        StorageLockedError: A process owns one of the folders.
        ConfigError: The store has another state format.
        StorageCorruptError: There is no complete generation, or the format is foreign or newer.
        StorageTimeoutError: A disk does not answer.
        StorageError: A folder or file cannot be read, or some of the state was in the process's memory only.
    """

    def open_newest() -> StateStore:
        with ExitStack() as undo:
            claimed = claim_folders(folders, job=job, rank=rank, create=False, undo=undo)
            inside = [folder.inside for folder in claimed]
            manifest = common_manifest(inside, rank=rank)
            require_recoverable(claimed[0].path, manifest, state_format=state_format)
            record = newest_complete(inside, manifest, newest)
            for device, folder in enumerate(claimed):
                folder.adopt(manifest.for_device(device))
            store = StateStore(
                claimed, manifest, record, direct_io=direct_io, io_engine=io_engine, io_timeout=io_timeout
            )
            store.restore_places()
            if training is not None:
                store.records.resume_from(training, run=run or uuid.uuid4().bytes)
            undo.pop_all()
            return store

    return _opened(open_newest, folders, "Opening the store", seconds=io_timeout, remove=False)


def find_resumable(
    folders: Sequence[Path],
    *,
    job: str,
    rank: int,
    io_timeout: float = IO_TIMEOUT,
    check: Callable[[TrainingRecord], object] = bool,
) -> tuple[Manifest, list[TrainingRecord]]:
    """Return a store's manifest and the training records to resume from, newest first.

    The generations and the residuals of these records are complete and intact.

    Args:
        folders: The folders given to :func:`create_store`, in the same order.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        io_timeout: ``TransferConfig.io_timeout``.
        check: Called with each record; raises StorageCorruptError if its content cannot be read.

    Raises:
        StorageLockedError, StorageCorruptError, StorageTimeoutError: As for :func:`recover_store`. StorageCorruptError
            also if a record or residual is damaged, and there is no other record to resume from.
        StorageError: As there. Also if a training ended within its set-up or wrote no more records, or if several steps
            after the last record have overwritten its state.
    """

    def look() -> tuple[Manifest, list[TrainingRecord]]:
        refuse_lost(folders, job=job, rank=rank)
        with ExitStack() as claims:
            claimed = claim_folders(folders, job=job, rank=rank, create=False, undo=claims)
            inside = [folder.inside for folder in claimed]
            for folder in inside:
                require_files(folder)
                if folder.status(MANIFEST_NAME) is None:
                    raise StorageError(
                        f"There is no training to resume in {str(folder.path)!r}: it ended within its set-up.",
                        user_calls().begin_anew,
                    )
            manifest = common_manifest(inside, rank=rank)
            usable, problem, damage = usable_records(inside, manifest)
            if problem is not None:
                raise problem
            if damage is not None:
                warnings.warn(f"{damage} Going on from step {usable[0].step}.", stacklevel=2)
            for sentence in damaged_beside(inside[0], manifest, usable):
                warnings.warn(sentence, stacklevel=2)
            return manifest, with_whole_residuals(inside[0], manifest, usable)

    with io_limit(io_timeout):
        manifest, records = limited("Reading the store in", Path(folders[0]).absolute(), look)
    for record in records:
        check(record)
    return manifest, records


def _opened(
    make: Callable[[], StateStore], folders: Sequence[Path], doing: str, *, seconds: float, remove: bool
) -> StateStore:
    first = Path(folders[0]).absolute()
    return in_time(make, doing=f"{doing} in", path=first, seconds=seconds, undo=lambda late: late.release(remove))
