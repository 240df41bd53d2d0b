"""The commit record: which slot of every tasklet, and which step of every parameter, is current.

commit.bin holds two places of whole blocks; generation ``g`` goes to place ``g % 2``. A record, little endian::

    8 bytes    magic LSICMT01
    u32        version (1)
    u32        number of parameters P
    16 bytes   job id, as in the extents
    i64        generation
    u64        number of tasklets T
    u64        length of the record in bytes, checksum included
    ceil(T/8)  slot of each tasklet, one bit each, lowest bit first
    i64[T]     generation of the extent in that slot: older than the record's where nothing was updated since
    i64[P]     updates of each parameter so far
    u32        CRC32C of everything before
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.store.extents import BLOCK_BYTES
from lightning_smartinfinity.store.faults import storage_errors

__all__ = ["CommitRecord", "erase_record", "place_bytes", "read_records", "write_record"]

_MAGIC = b"LSICMT01"
_VERSION = 1
_HEADER = struct.Struct("<8sII16sqQQ")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, eq=False)
class CommitRecord:
    """A committed generation.

    Args:
        generation: Its number, from 0.
        slots: uint8[num_tasklets], 0 or 1.
        tasklet_generations: int64[num_tasklets]: generation of the extent in that slot.
        steps: int64[num_parameters]: updates of each parameter so far.
    """

    generation: int
    slots: NDArray[np.uint8]
    tasklet_generations: NDArray[np.int64]
    steps: NDArray[np.int64]


def place_bytes(num_tasklets: int, num_parameters: int) -> int:
    """Size of one of the two places of commit.bin, in whole blocks."""
    length = _HEADER.size + -(-num_tasklets // 8) + 8 * (num_tasklets + num_parameters) + _CHECKSUM.size
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def write_record(path: Path, record: CommitRecord, *, job: bytes, flush: bool) -> None:
    """Write a record at the place that its predecessor does not use.

    Args:
        path: commit.bin, preallocated.
        record: What to write.
        job: 16 bytes of the store's identity.
        flush: Flush the device afterwards.

    Raises:
        StorageError: It could not be written.
    """
    content = encode_record(record, job=job)
    offset = _place_offset(record)
    with storage_errors("Writing the commit record", path):
        _write_at(path, content, offset, flush=flush)


def erase_record(path: Path, record: CommitRecord, *, flush: bool) -> None:
    """Make a record unreadable whose writing failed half-way. Raises as :func:`write_record`."""
    with storage_errors("Erasing the commit record", path):
        _write_at(path, bytes(BLOCK_BYTES), _place_offset(record), flush=flush)


def read_records(path: Path, *, num_tasklets: int, num_parameters: int, job: bytes) -> list[CommitRecord]:
    """The intact records of commit.bin, newest first: none, one or two."""
    with storage_errors("Reading the commit record", path):
        content = path.read_bytes()
    size = place_bytes(num_tasklets, num_parameters)
    places = (content[:size], content[size : 2 * size])
    found = [
        decode_record(place, num_tasklets=num_tasklets, num_parameters=num_parameters, job=job) for place in places
    ]
    return sorted(
        (record for record in found if record is not None), key=lambda record: record.generation, reverse=True
    )


def encode_record(record: CommitRecord, *, job: bytes) -> bytes:
    """The record's bytes."""
    body = b"".join(
        (
            np.packbits(record.slots, bitorder="little").tobytes(),
            record.tasklet_generations.astype("<i8").tobytes(),
            record.steps.astype("<i8").tobytes(),
        )
    )
    length = _HEADER.size + len(body) + _CHECKSUM.size
    header = _HEADER.pack(_MAGIC, _VERSION, len(record.steps), job, record.generation, len(record.slots), length)
    return header + body + _CHECKSUM.pack(_crc(header + body))


def decode_record(content: bytes, *, num_tasklets: int, num_parameters: int, job: bytes) -> CommitRecord | None:
    """The record at the start of ``content``, or None when it is absent, torn or another store's."""
    if len(content) < _HEADER.size:
        return None
    magic, version, parameters, its_job, generation, tasklets, length = _HEADER.unpack_from(content)
    expected = (_MAGIC, _VERSION, num_parameters, job, num_tasklets)
    if (magic, version, parameters, its_job, tasklets) != expected or not _HEADER.size < length <= len(content):
        return None
    end = length - _CHECKSUM.size
    if _CHECKSUM.unpack_from(content, end)[0] != _crc(content[:end]):
        return None
    bitmap_bytes = -(-num_tasklets // 8)
    bitmap = np.frombuffer(content, np.uint8, bitmap_bytes, _HEADER.size)
    numbers = np.frombuffer(content, "<i8", num_tasklets + num_parameters, _HEADER.size + bitmap_bytes).astype(np.int64)
    return CommitRecord(
        generation=generation,
        slots=np.unpackbits(bitmap, count=num_tasklets, bitorder="little"),
        tasklet_generations=numbers[:num_tasklets],
        steps=numbers[num_tasklets:],
    )


def _place_offset(record: CommitRecord) -> int:
    return (record.generation % 2) * place_bytes(len(record.slots), len(record.steps))


def _crc(content: bytes) -> int:
    values = np.frombuffer(content, np.uint8)
    return native.crc32c(values.ctypes.data, values.nbytes)


def _write_at(path: Path, content: bytes, offset: int, *, flush: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
        if flush:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
