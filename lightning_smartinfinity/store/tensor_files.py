"""Files for a rank's tensors, in folders of their own beside those of the state."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageError, StorageTimeoutError
from lightning_smartinfinity.store.direct import adopt_descriptor, has_direct, open_state_file
from lightning_smartinfinity.store.extents import BLOCK_BYTES
from lightning_smartinfinity.store.folders import (
    PARAMETERS_NAME,
    STATE_NAME,
    RankFolder,
    open_rank_folder,
    parameter_folder_path,
    rank_folder_path,
    rank_of_parameters,
)
from lightning_smartinfinity.store.lock import is_locked
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.scheduling import scheduler_of

__all__ = ["UNNAMED", "TensorFiles", "UnnamedFiles", "are_in_use", "deal", "remove_leftovers", "whole_blocks"]


UNNAMED = "(unnamed file)"
"""What stands for the name of a file that has none."""


def whole_blocks(nbytes: int) -> int:
    """Round ``nbytes`` up to whole blocks, which is what direct I/O transfers."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def deal(sizes: Iterable[int], num_files: int) -> list[int]:
    """Return the bytes in each file for tensors of these sizes: each goes to the file that holds least so far."""
    totals = [0] * num_files
    for nbytes in sizes:
        totals[min(range(num_files), key=totals.__getitem__)] += whole_blocks(nbytes)
    return totals


class TensorFiles:
    """``<storage>/<job>/parameters-<n>/`` in every storage folder, owned (locked) by this process until :meth:`close`.

    The files are empty at first and do not outlive the process: those of a killed process are deleted by the next one.

    Args:
        folders: Storage folders, created where missing; one file each.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        direct_io: ``TransferConfig.direct_io``.

    Raises:
        StorageLockedError: Another process owns one of the folders.
        StorageError: A folder cannot be used.

    Attributes:
        files: The file of each storage folder.
    """

    def __init__(self, folders: Sequence[Path], *, job: str, rank: int, direct_io: str) -> None:
        with ExitStack() as undo:
            claimed = []
            for folder in folders:
                path = parameter_folder_path(Path(os.path.abspath(folder)), job=job, rank=rank)
                claimed.append(RankFolder(path, create=True))
                undo.callback(claimed[-1].discard)
            for owned in claimed:
                owned.remove_leftover()
            for owned in claimed:
                owned.allocate(PARAMETERS_NAME, 0)
            self.files = tuple(open_state_file(owned.inside, PARAMETERS_NAME, direct_io) for owned in claimed)
            undo.pop_all()
        self._folders = tuple(claimed)

    def close(self) -> None:
        """Close, delete and unlock; idempotent."""
        for file in self.files:
            file.close()
        for folder in self._folders:
            folder.close(remove=True)
        self._folders = ()


class UnnamedFiles:
    """Files without a name beside a rank's state, which are gone when the process ends, however it ends.

    Args:
        folders: Storage folders, in which the rank's store is open; one file each.
        job: ``TransferConfig.job``.
        rank: Rank of this process.
        direct_io: ``TransferConfig.direct_io``; the store has said already if there is no direct I/O.

    Raises:
        StorageError: A file cannot be created.

    Attributes:
        files: The file of each storage folder.
    """

    def __init__(self, folders: Sequence[Path], *, job: str, rank: int, direct_io: str) -> None:
        opened: list[native.StateFile] = []
        with ExitStack() as undo:
            for folder in folders:
                path = rank_folder_path(Path(os.path.abspath(folder)), job=job, rank=rank)
                opened.append(_unnamed_file(path, wants_direct=direct_io != "off"))
                undo.callback(opened[-1].close)
            undo.pop_all()
        self.files = tuple(opened)

    def close(self) -> None:
        """Close the files, which deletes them; idempotent."""
        for file in self.files:
            file.close()


def _unnamed_file(path: Path, *, wants_direct: bool) -> native.StateFile:
    with storage_errors("Creating a file in", path), closing(open_rank_folder(path)) as folder:
        direct = wants_direct and has_direct(folder, STATE_NAME)
        descriptor = folder.open_unnamed(os.O_RDWR | (os.O_DIRECT if direct else 0))
        return adopt_descriptor(path / UNNAMED, descriptor, direct=direct, scheduler=scheduler_of(descriptor))


def are_in_use(folders: Sequence[Path], *, job: str, rank: int) -> bool:
    """Return whether a process has locked the folder of a rank's parameters in one of the storage folders."""
    for folder in folders:
        path = parameter_folder_path(Path(os.path.abspath(folder)), job=job, rank=rank)
        with suppress(OSError, StorageError), closing(open_rank_folder(path)) as opened:
            if is_locked(opened):
                return True
    return False


def remove_leftovers(folders: Sequence[Path], *, job: str, spared: Collection[int] = ()) -> None:
    """Delete what killed processes have left of a job's parameters. What is locked or cannot be deleted stays.

    Any number of processes may call it at once.

    Args:
        folders: Storage folders.
        job: ``TransferConfig.job``.
        spared: Ranks whose folders stay.

    Raises:
        StorageTimeoutError: A disk does not answer.
    """
    for folder in folders:
        of_job = Path(os.path.abspath(folder)) / job
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(of_job)
        for name in names:
            rank = rank_of_parameters(name)
            if rank is not None and rank not in spared:
                _remove_leftover(of_job / name)


def _remove_leftover(path: Path) -> None:
    try:
        with ExitStack() as opened:
            folder = RankFolder(path, create=False)
            opened.callback(folder.close, remove=False)
            folder.destroy()
    except StorageTimeoutError:
        raise
    except (OSError, StorageError):
        return
