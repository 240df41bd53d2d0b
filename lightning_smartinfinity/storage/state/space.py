"""Compares free space with what all ranks of a machine need, file system by file system."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage.extents import ExtentMap
from lightning_smartinfinity.storage.folders.lock import is_locked, read_notes
from lightning_smartinfinity.storage.folders.lock_content import KEPT
from lightning_smartinfinity.storage.folders.manifest import MANIFEST_NAME, read_manifest
from lightning_smartinfinity.storage.folders.rank_folder import (
    open_rank_folder,
    owned_names,
    rank_folder_path,
)
from lightning_smartinfinity.storage.io.files import bounded
from lightning_smartinfinity.storage.io.os_errors import FULL, storage_errors
from lightning_smartinfinity.storage.records.residual_file import residual_bytes
from lightning_smartinfinity.storage.state.commit_record import record_bytes
from lightning_smartinfinity.storage.state.parts import Part
from lightning_smartinfinity.storage.tensors.tensor_files import deal

__all__ = [
    "PARAMETERS",
    "SPILLED_GRADIENTS",
    "Shortfall",
    "SpaceRequest",
    "has_room",
    "leftover_bytes",
    "measure_activation_space",
    "measure_gradient_space",
    "measure_parts",
    "measure_residual_space",
    "measure_space",
    "measure_tensor_space",
    "nearest_existing",
    "overhead_bytes",
    "require_space",
    "shortfalls",
]

# Bytes for the lock, the manifest and folders.
_SMALL_FILES_BYTES = 64 * 1024
_MANIFEST_BYTES_PER_PARAMETER = 512

PARAMETERS = "parameters"
SPILLED_GRADIENTS = "gradients that are not held in memory"
_ACTIVATIONS = "activations"
_GRADIENTS = "gradients on their way to SmartSSDs"
_RESIDUALS = "residuals of compressed gradients"
_REMEDY = (
    "Free space there, spread the state over more storage folders, choose a smaller state_format, or halve the"
    " need with TransferConfig(durability='none')."
)
_REMEDY_OF_RESIDUALS = " TransferConfig(keep=False) keeps no residuals to resume from."
_REMEDY_OF_SPILLED = " TransferConfig(gradient_bytes=...) as large as all gradients needs no space for them."
_REMEDY_OF_ACTIVATIONS = " ActivationOffload(storage_bytes=...) says how much space is needed for them."
_REMEDY_OF_GRADIENTS = " SmartSSDConfig(gradient_route='host') needs no space for gradients."


@dataclass(frozen=True, kw_only=True)
class SpaceRequest:
    """The space that one rank needs in one storage folder. Ranks gather it as an object, so its values are plain.

    Args:
        machine: :func:`~lightning_smartinfinity.common.machine.machine_identity` of the rank; empty once
            ``file_system`` is a number that identifies the file system on all machines.
        host: The rank's own name for its machine, for messages only.
        file_system: ``st_dev`` of the folder (of its nearest existing parent).
        path: The storage folder.
        needed_bytes: Bytes that this rank will allocate there.
        free_bytes: Bytes available to the rank there.
        reclaimable_bytes: Bytes of a leftover store there, which is deleted first.
        resumable_bytes: Bytes of an interrupted training there, which is archived first.
        what: Name of the data that needs the space.
    """

    machine: str
    host: str
    file_system: int
    path: str
    needed_bytes: int
    free_bytes: int
    reclaimable_bytes: int = 0
    resumable_bytes: int = 0
    what: str = "optimizer state"


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A file system that is too small for all the ranks that share it.

    Args:
        hosts: These ranks' own names for their machine, sorted. Containers on one machine may have different names.
        paths: The storage folders on the file system, sorted.
        needed_bytes: Bytes that all ranks need together.
        free_bytes: Bytes available, including leftover stores that will be deleted.
        what: Names of the data that needs the space, each once.
        resumable_bytes: Bytes of interrupted trainings there.
    """

    hosts: tuple[str, ...]
    paths: tuple[str, ...]
    needed_bytes: int
    free_bytes: int
    what: tuple[str, ...] = ("optimizer state",)
    resumable_bytes: int = 0


def measure_space(
    folders: Sequence[Path],
    *,
    job: str,
    rank: int,
    extents: ExtentMap,
    num_parameters: int,
    moved: Collection[Path] = (),
) -> list[SpaceRequest]:
    """Return this rank's requests for the store, one per storage folder. Nothing is left there.

    Args:
        folders: Storage folders, as for ``create_store``.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        extents: ``PartitionLayout.extents``.
        num_parameters: Number of parameters in the partition.
        moved: Rank folders that will be moved away first. The leftover in another rank folder will be deleted.

    Raises:
        StorageError: The free space of a folder cannot be read, or is too small because nothing can be created there.
    """
    commit_bytes = 2 * record_bytes(extents.num_tasklets, num_parameters)
    overhead = overhead_bytes(extents.num_tasklets, num_parameters)
    own = [rank_folder_path(Path(os.path.abspath(folder)), job=job, rank=rank) for folder in folders]
    return [
        _request(
            Path(folder),
            needed_bytes=extents.file_bytes(device) + overhead - (commit_bytes if device else 0),
            leftover=None if own[device] in moved else own[device],
        )
        for device, folder in enumerate(folders)
    ]


def measure_parts(parts: Iterable[Part], *, deleted: bool) -> list[SpaceRequest]:
    """Return requests for 0 bytes with the bytes that are deleted, or moved on one file system, before a store is made.

    Args:
        parts: Parts of trainings that this rank is responsible for.
        deleted: Whether they are deleted.

    Raises:
        StorageError: The free space of a folder cannot be read.
    """
    return [
        replace(
            _request(part.storage, needed_bytes=0),
            reclaimable_bytes=part.num_bytes if deleted else 0,
            resumable_bytes=0 if deleted else part.num_bytes,
        )
        for part in parts
    ]


def overhead_bytes(num_tasklets: int, num_parameters: int) -> int:
    """Return an upper limit of a rank's bytes in its first folder except the state file: manifest, records, lock."""
    small = _SMALL_FILES_BYTES + _MANIFEST_BYTES_PER_PARAMETER * num_parameters
    return small + 2 * record_bytes(num_tasklets, num_parameters)


def shortfalls(requests: Iterable[SpaceRequest]) -> tuple[Shortfall, ...]:
    """Return the file systems that have less free space than all ranks need together.

    The result depends on the set of requests only, not on their order, so that it is the same on every rank.
    """
    shared: dict[tuple[str, int], list[SpaceRequest]] = {}
    for request in requests:
        shared.setdefault((request.machine, request.file_system), []).append(request)
    totals = (_total(shared[key]) for key in sorted(shared))
    return tuple(total for total in totals if total.needed_bytes > total.free_bytes)


def require_space(requests: Iterable[SpaceRequest]) -> None:
    """Check that every file system is large enough.

    Raises:
        StorageFullError: One is too small; the message names folders, bytes needed and bytes free.
    """
    missing = shortfalls(requests)
    if not missing:
        return
    problem = " ".join(
        f"{_subject(item.what)} {_readable(item.needed_bytes)} in {', '.join(map(repr, item.paths))}"
        f" on {', '.join(map(repr, item.hosts))}, where {_readable(item.free_bytes)} are free."
        for item in missing
    )
    remedies = {
        _GRADIENTS: _REMEDY_OF_GRADIENTS,
        SPILLED_GRADIENTS: _REMEDY_OF_SPILLED,
        _RESIDUALS: _REMEDY_OF_RESIDUALS,
        _ACTIVATIONS: _REMEDY_OF_ACTIVATIONS,
    }
    further = "".join(words for what, words in remedies.items() if any(what in item.what for item in missing))
    raise StorageFullError(problem, "".join(map(_of_interrupted, missing)) + _REMEDY + further)


def _of_interrupted(item: Shortfall) -> str:
    if not item.resumable_bytes:
        return ""
    return (
        f"{_readable(item.resumable_bytes)} there belong to earlier trainings, which smart-infinity jobs"
        f" {item.paths[0]} lists: resume one with {user_calls().from_storage}, or remove it. "
    )


def has_room(folder: Path, num_bytes: int, *, ranks: int) -> bool:
    """Return whether half of the free space stays free if the files of this many ranks grow by ``num_bytes`` each.

    Raises:
        StorageError: The free space of the folder cannot be read.
    """
    return 2 * ranks * num_bytes <= _request(folder, needed_bytes=num_bytes).free_bytes


def measure_tensor_space(folders: Sequence[Path], *, sizes: Iterable[int], what: str) -> list[SpaceRequest]:
    """Return this rank's requests for tensors, one per storage folder, without creating anything.

    Args:
        folders: Storage folders, as for ``UnnamedFiles``.
        sizes: Bytes of each tensor.
        what: :data:`PARAMETERS`, :data:`SPILLED_GRADIENTS`, or another name of such data.

    Raises:
        StorageError: The free space of a folder cannot be read.
    """
    each = zip(folders, deal(sizes, len(folders)), strict=True)
    return [_request(Path(folder), needed_bytes=needed, what=what) for folder, needed in each]


def measure_activation_space(folders: Sequence[Path], *, nbytes: int) -> list[SpaceRequest]:
    """Return this rank's requests for activations, one per storage folder, without creating anything.

    Args:
        folders: Storage folders, as for ``UnnamedFiles``.
        nbytes: Bytes of all activations that may be on storage at once.

    Raises:
        StorageError: The free space of a folder cannot be read.
    """
    sizes = [-(-nbytes // len(folders))] * len(folders)
    return measure_tensor_space(folders, sizes=sizes, what=_ACTIVATIONS)


def measure_gradient_space(folders: Sequence[Path], *, nbytes: int) -> list[SpaceRequest]:
    """Return this rank's requests for gradient files, one in each storage folder, without creating anything.

    Args:
        folders: Storage folders.
        nbytes: Bytes of each file.

    Raises:
        StorageError: The free space of a folder cannot be read.
    """
    return [_request(Path(folder), needed_bytes=nbytes, what=_GRADIENTS) for folder in folders]


def leftover_bytes(path: Path) -> int:
    """Return the bytes allocated by the leftover in a rank's folder that the creation of a new store deletes."""
    try:
        with closing(open_rank_folder(path)) as folder:
            notes = read_notes(folder)  # if it is damaged, the manifest shows whether the rest is a leftover
            manifest = None if folder.status(MANIFEST_NAME) is None else read_manifest(folder)
            if is_locked(folder) or KEPT in notes or (manifest is not None and manifest.keep):
                return 0
            sizes = map(folder.status, owned_names(folder, notes, manifest))
            # `st_blocks` counts units of 512 bytes on every file system.
            return sum(status.st_blocks * 512 for status in sizes if status is not None)
    except (OSError, StorageError):
        return 0


def measure_residual_space(folder: Path, *, numel: int) -> list[SpaceRequest]:
    """Return this rank's request for the residuals of two training records, without creating anything.

    Args:
        folder: The first storage folder.
        numel: Number of values of a residual; 0 if there is none.

    Raises:
        StorageError: The free space of the folder cannot be read.
    """
    return [_request(folder, needed_bytes=residual_bytes(numel), what=_RESIDUALS)] if numel else []


def _subject(what: Sequence[str]) -> str:
    return f"The {' and the '.join(what)} {'need' if what != ('optimizer state',) else 'needs'}"


def _total(requests: Sequence[SpaceRequest]) -> Shortfall:
    # Every rank measured the same free space at a slightly different time: the smallest value counts.
    free_bytes = min(request.free_bytes for request in requests)
    return Shortfall(
        hosts=tuple(sorted({request.host for request in requests})),
        paths=tuple(sorted({request.path for request in requests if request.needed_bytes})),
        what=tuple(sorted({request.what for request in requests if request.needed_bytes})),
        needed_bytes=sum(request.needed_bytes for request in requests),
        free_bytes=free_bytes + sum(request.reclaimable_bytes for request in requests),
        resumable_bytes=sum(request.resumable_bytes for request in requests),
    )


@bounded("Looking for free space in")
def _request(
    folder: Path, *, needed_bytes: int, leftover: Path | None = None, what: str = "optimizer state"
) -> SpaceRequest:
    """Return a request for space in a folder, where ``leftover`` is the rank's folder that will be replaced.

    Raises:
        StorageTimeoutError: The disk does not answer.
        StorageError: The free space cannot be read.
    """
    reclaimable = 0 if leftover is None else leftover_bytes(leftover)
    with storage_errors("Looking for free space in", folder):
        existing = nearest_existing(folder.absolute())
        status = os.statvfs(existing)
        request = SpaceRequest(
            machine=machine_identity(),
            host=platform.node(),
            file_system=os.stat(existing).st_dev,
            path=str(folder),
            needed_bytes=needed_bytes,
            free_bytes=status.f_bavail * status.f_frsize,
            reclaimable_bytes=reclaimable,
            what=what,
        )
    if needed_bytes > request.free_bytes + reclaimable:
        with storage_errors("Creating a file or folder for", folder):
            _try_to_create(existing)
    return request


def _try_to_create(folder: Path) -> None:
    """Raise OSError if nothing can be created in a folder, unless its file system is full.

    A file system that is read-only, or cannot hold new files (``/proc``), has no free space either, but more space
    would not help.
    """
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".smart-infinity-", dir=folder))
    except OSError as error:
        if error.errno not in FULL:
            raise


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    # Without permission a path seems not to exist: its parent is measured, and creating the store raises the error.
    while not os.path.exists(path):
        path = path.parent
    return path


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
