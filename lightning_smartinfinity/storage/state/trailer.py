"""Verifies a generation by the trailer at the end of every extent. The native core knows the trailer's layout."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning_smartinfinity import native
from lightning_smartinfinity.native import TRAILER_BYTES
from lightning_smartinfinity.storage.extents import ExtentMap
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import STATE_NAME
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.state.commit_record import CommitRecord

__all__ = ["first_mismatch"]


def first_mismatch(
    folders: Sequence[OpenFolder], extents: ExtentMap, record: CommitRecord, identity: native.Identity
) -> str | None:
    """Compare the trailer of every extent that a record names with the expected one.

    Args:
        folders: The rank's folder of each device.
        extents: The extents of the tasklets.
        record: The generation to verify.
        identity: The identity that every extent carries.

    Returns:
        A sentence about the first extent that does not match, with its path and offset; None if all match.

    Raises:
        StorageError: A file cannot be read.
    """
    problems = (_mismatch_in_file(folder, device, extents, record, identity) for device, folder in enumerate(folders))
    return next((problem for problem in problems if problem is not None), None)


def _mismatch_in_file(
    folder: OpenFolder, device: int, extents: ExtentMap, record: CommitRecord, identity: native.Identity
) -> str | None:
    path = folder.path / STATE_NAME
    with storage_errors("Reading", path), folder.reader(STATE_NAME) as file:
        size = os.fstat(file.fileno()).st_size
        for tasklet, extent in enumerate(extents.extents):
            if record.placement.devices[tasklet] != device:
                continue
            generation = int(record.tasklet_generations[tasklet])
            place = extents.place_offset(int(record.placement.positions[tasklet]))
            offset = place + extent.nbytes - TRAILER_BYTES
            # A damaged position may exceed the largest offset of a system call.
            trailer = os.pread(file.fileno(), TRAILER_BYTES, offset) if offset < size else b""
            if not native.is_trailer_of(
                trailer,
                identity,
                index=tasklet,
                generation=generation,
                numel=extent.numel,
                num_arrays=extents.num_arrays,
                extent_bytes=extent.nbytes,
            ):
                return (
                    f"{str(path)!r} does not hold generation {generation} of tasklet {tasklet} "
                    f"(trailer at offset {offset})."
                )
    return None
