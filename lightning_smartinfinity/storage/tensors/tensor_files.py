"""Unnamed files for a rank's tensors, which the kernel frees when the process ends, even by a kill."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.folders.direct import make_unnamed_file
from lightning_smartinfinity.storage.folders.rank_folder import in_job_folder
from lightning_smartinfinity.storage.io.os_errors import storage_errors

__all__ = ["UnnamedFiles", "deal", "whole_blocks"]


def whole_blocks(nbytes: int) -> int:
    """Round ``nbytes`` up to whole blocks, as direct I/O requires."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def deal(sizes: Iterable[int], num_files: int) -> list[int]:
    """Return the bytes in each file if each tensor of these sizes goes to the file with the fewest bytes so far."""
    totals = [0] * num_files
    for nbytes in sizes:
        totals[min(range(num_files), key=totals.__getitem__)] += whole_blocks(nbytes)
    return totals


class UnnamedFiles:
    """Empty, unnamed files in ``<storage>/<job>/``, which the kernel frees when the process ends, even by a kill.

    Args:
        folders: Storage folders, created where missing; one file each.
        job: ``TransferConfig.job``.
        direct_io: ``TransferConfig.direct_io``.

    Raises:
        StorageError: A folder cannot be used, or a file cannot be created there.

    Attributes:
        files: The file of each storage folder.
    """

    def __init__(self, folders: Sequence[Path], *, job: str, direct_io: str) -> None:
        opened: list[native.StateFile] = []
        with ExitStack() as undo:
            for folder in folders:
                path = Path(os.path.abspath(folder)) / job
                with storage_errors("Creating a file in", path):
                    opened.append(in_job_folder(path, partial(make_unnamed_file, direct_io=direct_io)))
                undo.callback(opened[-1].close)
            undo.pop_all()
        self.files = tuple(opened)

    def close(self) -> None:
        """Close the files, which deletes them; idempotent."""
        for file in self.files:
            file.close()
