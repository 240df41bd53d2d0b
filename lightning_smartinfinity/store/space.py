"""Free space, summed per file system over all ranks of a machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.machine import machine_identity
from lightning_smartinfinity.store.extents import ExtentMap
from lightning_smartinfinity.store.folders import parameter_folder_path, rank_folder_path, reclaimable_bytes
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.parameter_files import deal
from lightning_smartinfinity.store.record import record_bytes

__all__ = [
    "Shortfall",
    "SpaceRequest",
    "has_room",
    "measure_gradient_space",
    "measure_parameter_space",
    "measure_space",
    "require_space",
    "shortfalls",
]

# Lock, manifest and folders.
_SMALL_FILES_BYTES = 64 * 1024
_MANIFEST_BYTES_PER_PARAMETER = 512

_GRADIENTS = "gradients on their way to SmartSSDs"
_REMEDY = (
    "Free space there, spread the state over more storage folders, choose a smaller state_format, or halve the"
    " need with TransferConfig(durability='none')."
)
_REMEDY_OF_GRADIENTS = " SmartSSDConfig(gradient_route='host') needs no space for gradients."


@dataclass(frozen=True, kw_only=True)
class SpaceRequest:
    """What one rank wants in one storage folder. Plain values: gather them from all ranks as objects.

    Args:
        machine: :func:`~lightning_smartinfinity.machine.machine_identity` of the rank.
        host: The name that the rank knows its machine by, for messages only.
        file_system: ``st_dev`` of the folder (of its nearest existing parent).
        path: The storage folder.
        needed_bytes: Bytes this rank will allocate there.
        free_bytes: Bytes available to it there.
        reclaimable_bytes: Bytes of a leftover store there that creating a new one deletes.
        what: What needs them, in words.
    """

    machine: str
    host: str
    file_system: int
    path: str
    needed_bytes: int
    free_bytes: int
    reclaimable_bytes: int = 0
    what: str = "optimizer state"


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A file system that is too small: the sums over all the ranks that share it.

    Args:
        hosts: The names that these ranks know their machine by, sorted: containers have names of their own.
        paths: The storage folders on it, sorted.
        needed_bytes: What all ranks need of it.
        free_bytes: What it has, leftovers to be deleted included.
        what: What needs them, in words, each once.
    """

    hosts: tuple[str, ...]
    paths: tuple[str, ...]
    needed_bytes: int
    free_bytes: int
    what: tuple[str, ...] = ("optimizer state",)


def measure_space(
    folders: Sequence[Path], *, job: str, rank: int, extents: ExtentMap, num_parameters: int
) -> list[SpaceRequest]:
    """This rank's requests, one per storage folder. Creates nothing.

    Args:
        folders: Storage folders, as for ``StateStore.create``.
        job: ``TransferConfig.job``.
        rank: Of this process.
        extents: ``PartitionLayout.extents``.
        num_parameters: Parameters of the partition.

    Raises:
        StorageError: A folder's file system cannot be asked.
    """
    overhead = _SMALL_FILES_BYTES + _MANIFEST_BYTES_PER_PARAMETER * num_parameters
    commit_bytes = 2 * record_bytes(extents.num_tasklets, num_parameters)
    return [
        _request(
            Path(folder),
            needed_bytes=extents.file_bytes(device) + overhead + (commit_bytes if device == 0 else 0),
            reclaimable=reclaimable_bytes(rank_folder_path(Path(folder), job=job, rank=rank)),
        )
        for device, folder in enumerate(folders)
    ]


def shortfalls(requests: Iterable[SpaceRequest]) -> tuple[Shortfall, ...]:
    """File systems whose free space is less than what all ranks need of them.

    The answer depends on the set of requests only, not on their order: the same on every rank.
    """
    shared: dict[tuple[str, int], list[SpaceRequest]] = {}
    for request in requests:
        shared.setdefault((request.machine, request.file_system), []).append(request)
    totals = (_total(shared[key]) for key in sorted(shared))
    return tuple(total for total in totals if total.needed_bytes > total.free_bytes)


def require_space(requests: Iterable[SpaceRequest]) -> None:
    """Raise if any file system is too small.

    Raises:
        StorageFullError: Naming folders, bytes needed and bytes free.
    """
    missing = shortfalls(requests)
    if not missing:
        return
    problem = " ".join(
        f"{_subject(item.what)} {_readable(item.needed_bytes)} in {', '.join(map(repr, item.paths))}"
        f" on {', '.join(map(repr, item.hosts))}, where {_readable(item.free_bytes)} are free."
        for item in missing
    )
    further = _REMEDY_OF_GRADIENTS if any(_GRADIENTS in item.what for item in missing) else ""
    raise StorageFullError(problem, _REMEDY + further)


def has_room(folder: Path, num_bytes: int, *, ranks: int) -> bool:
    """Whether files may grow by so much, if as many ranks do, and half of what is free stay free.

    Raises:
        StorageError: The folder's file system cannot be asked.
    """
    return 2 * ranks * num_bytes <= _request(folder, needed_bytes=num_bytes, reclaimable=0).free_bytes


def measure_parameter_space(
    folders: Sequence[Path], *, job: str, rank: int, sizes: Iterable[int]
) -> list[SpaceRequest]:
    """This rank's requests for its parameters, one per storage folder. Creates nothing.

    Args:
        folders: Storage folders, as for ``ParameterFiles``.
        job: ``TransferConfig.job``.
        rank: Of this process.
        sizes: Bytes of each parameter's partition.

    Raises:
        StorageError: A folder's file system cannot be asked.
    """
    return [
        _request(
            Path(folder),
            needed_bytes=needed,
            reclaimable=reclaimable_bytes(parameter_folder_path(Path(folder), job=job, rank=rank)),
            what="parameters",
        )
        for folder, needed in zip(folders, deal(sizes, len(folders)), strict=True)
    ]


def measure_gradient_space(folders: Sequence[Path], *, nbytes: int) -> list[SpaceRequest]:
    """This rank's requests for files that gradients go through, one in each storage folder. Creates nothing.

    Args:
        folders: Storage folders.
        nbytes: Of each file.

    Raises:
        StorageError: A folder's file system cannot be asked.
    """
    return [_request(Path(folder), needed_bytes=nbytes, reclaimable=0, what=_GRADIENTS) for folder in folders]


def _subject(what: Sequence[str]) -> str:
    return f"The {' and the '.join(what)} {'need' if what != ('optimizer state',) else 'needs'}"


def _total(requests: Sequence[SpaceRequest]) -> Shortfall:
    # Every rank saw the same free space at a slightly different moment: the least of them counts.
    free_bytes = min(request.free_bytes for request in requests)
    return Shortfall(
        hosts=tuple(sorted({request.host for request in requests})),
        paths=tuple(sorted({request.path for request in requests})),
        what=tuple(sorted({request.what for request in requests})),
        needed_bytes=sum(request.needed_bytes for request in requests),
        free_bytes=free_bytes + sum(request.reclaimable_bytes for request in requests),
    )


def _request(folder: Path, *, needed_bytes: int, reclaimable: int, what: str = "optimizer state") -> SpaceRequest:
    with storage_errors("Looking for free space in", folder):
        existing = _nearest_existing(folder.absolute())
        status = os.statvfs(existing)
        return SpaceRequest(
            machine=machine_identity(),
            host=platform.node(),
            file_system=os.stat(existing).st_dev,
            path=str(folder),
            needed_bytes=needed_bytes,
            free_bytes=status.f_bavail * status.f_frsize,
            reclaimable_bytes=reclaimable,
            what=what,
        )


def _nearest_existing(path: Path) -> Path:
    # A path that cannot be searched seems not to exist: its parent answers, and creating the store will complain.
    while not os.path.exists(path):
        path = path.parent
    return path


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
