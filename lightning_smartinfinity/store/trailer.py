"""The trailer that ends every extent: read here to verify a generation, written by the native core."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from lightning_smartinfinity import native
from lightning_smartinfinity.store.extents import ExtentMap
from lightning_smartinfinity.store.os_errors import storage_errors
from lightning_smartinfinity.store.record import CommitRecord

__all__ = ["TRAILER_BYTES", "first_mismatch"]

TRAILER_BYTES = 128
_MAGIC = b"LSIEXT01"
_VERSION = 1
# magic, version, state format, job, rank, number of arrays, tasklet, generation, numel, extent bytes
_FIELDS = struct.Struct("<8sII16sIIQQQQ")
_CHECKSUM_OFFSET = TRAILER_BYTES - 4


def first_mismatch(paths: list[Path], extents: ExtentMap, record: CommitRecord, *, job: bytes, rank: int) -> str | None:
    """Compare every extent that a record names with what it should be.

    Args:
        paths: The state file of each device.
        extents: Of the tasklets.
        record: The generation to verify.
        job: 16 bytes of the store's identity.
        rank: Of the owner.

    Returns:
        What is wrong with the first extent that does not fit, naming path and offset; None when all fit.

    Raises:
        StorageError: A file cannot be read.
    """
    for device, path in enumerate(paths):
        with storage_errors("Reading", path):
            problem = _mismatch_in_file(path, device, extents, record, job=job, rank=rank)
        if problem is not None:
            return problem
    return None


def _mismatch_in_file(
    path: Path, device: int, extents: ExtentMap, record: CommitRecord, *, job: bytes, rank: int
) -> str | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for tasklet, extent in enumerate(extents.extents):
            if record.placement.devices[tasklet] != device:
                continue
            generation = int(record.tasklet_generations[tasklet])
            expected = (_MAGIC, _VERSION, extents.format.number, job, rank, extents.num_arrays, tasklet, generation)
            place = extents.place_offset(int(record.placement.positions[tasklet]))
            offset = place + extent.nbytes - TRAILER_BYTES
            trailer = os.pread(descriptor, TRAILER_BYTES, offset)
            if not _fits(trailer, (*expected, extent.numel, extent.nbytes)):
                return (
                    f"{str(path)!r} does not hold generation {generation} of tasklet {tasklet} "
                    f"(trailer at offset {offset})."
                )
    finally:
        os.close(descriptor)
    return None


def _fits(trailer: bytes, expected: tuple[object, ...]) -> bool:
    if len(trailer) != TRAILER_BYTES or _FIELDS.unpack_from(trailer) != expected:
        return False
    content = np.frombuffer(trailer, np.uint8, _CHECKSUM_OFFSET)
    checksum = native.crc32c(content.ctypes.data, content.nbytes)
    return struct.unpack_from("<I", trailer, _CHECKSUM_OFFSET) == (checksum,)
