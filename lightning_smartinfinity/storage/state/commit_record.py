"""The commit record: the place of every tasklet and the step count of every parameter.

commit.bin has two halves of whole blocks; generation ``g`` goes to half ``g % 2``. A record, little endian::

    8 bytes    magic LSICMT01
    u32        version (2)
    u32        number of parameters P
    16 bytes   job id, as in the extents
    i64        generation
    u64        number of tasklets T
    u64        length of the record in bytes, checksum included
    i64[T]     generation of each tasklet's extent: older than the record's if the tasklet was not updated since
    i64[P]     updates of each parameter so far
    u32[T]     position of each tasklet: number of its place within its state file
    u16[T]     device of each tasklet: index of the storage folder with that file
    u32        CRC32C of everything before

A record is erased by a mark in its first block, not by zeros, because zeros mean that a half was never written.
Before generations are written at an interval, the half that was never written gets this mark, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import COMMIT_NAME
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.sealed import RecordFormat
from lightning_smartinfinity.storage.spread import Placement

__all__ = [
    "CommitRecord",
    "Records",
    "erase_record",
    "flush_records",
    "no_record",
    "read_records",
    "record_bytes",
    "write_record",
]

_FORMAT = RecordFormat(b"LSICMT01", 2, "I16sqQQ")
_BYTES_PER_TASKLET = 8 + 4 + 2
_BYTES_PER_PARAMETER = 8
_ERASED = b"LSIERASE".ljust(BLOCK_BYTES, b"\0")


@dataclass(frozen=True, kw_only=True, eq=False)
class CommitRecord:
    """A committed generation.

    Args:
        generation: Number of the generation, from 0.
        placement: Place of every tasklet's extent.
        tasklet_generations: int64[num_tasklets]: generation of that extent.
        steps: int64[num_parameters]: updates of each parameter so far.
    """

    generation: int
    placement: Placement
    tasklet_generations: NDArray[np.int64]
    steps: NDArray[np.int64]


class Records(NamedTuple):
    """The content of commit.bin.

    Attributes:
        intact: The intact records (at most two), newest first.
        problem: A sentence about a half that was written but holds no valid record, or None.
    """

    intact: list[CommitRecord]
    problem: str | None


def no_record(num_tasklets: int, num_parameters: int) -> CommitRecord:
    """Return the record of a store before its first commit: generation -1, in which nothing was written."""
    return CommitRecord(
        generation=-1,
        placement=Placement(np.zeros(num_tasklets, np.uint16), np.zeros(num_tasklets, np.uint32)),
        tasklet_generations=np.full(num_tasklets, -1, np.int64),
        steps=np.zeros(num_parameters, np.int64),
    )


def record_bytes(num_tasklets: int, num_parameters: int) -> int:
    """Return the bytes that commit.bin reserves for each of its two records, in whole blocks."""
    return -(-_length(num_tasklets, num_parameters) // BLOCK_BYTES) * BLOCK_BYTES


def _length(num_tasklets: int, num_parameters: int) -> int:
    return _FORMAT.empty_bytes + _BYTES_PER_TASKLET * num_tasklets + _BYTES_PER_PARAMETER * num_parameters


def write_record(folder: OpenFolder, record: CommitRecord, *, job: bytes, flush: bool) -> int:
    """Write a record into the half of commit.bin that does not hold its predecessor.

    Args:
        folder: The rank's first folder, with commit.bin preallocated.
        record: The record to write.
        job: 16 bytes that identify the store's job.
        flush: Whether to flush the device afterwards.

    Returns:
        Size of the record in bytes.

    Raises:
        StorageError: The record could not be written.
    """
    content = encode_record(record, job=job)
    offset = _record_offset(record)
    with storage_errors("Writing the commit record", folder.path / COMMIT_NAME):
        folder.overwrite(COMMIT_NAME, content, offset=offset, flush=flush)
    return len(content)


def erase_record(folder: OpenFolder, record: CommitRecord, *, flush: bool) -> None:
    """Erase a record, even one that was only partly written. Raises as :func:`write_record`."""
    with storage_errors("Erasing the commit record", folder.path / COMMIT_NAME):
        folder.overwrite(COMMIT_NAME, _ERASED, offset=_record_offset(record), flush=flush)


def flush_records(folder: OpenFolder) -> None:
    """Flush the records to the device. Raises as :func:`write_record`."""
    with storage_errors("Flushing", folder.path / COMMIT_NAME), folder.reader(COMMIT_NAME) as file:
        os.fsync(file.fileno())


def read_records(
    folder: OpenFolder, *, num_tasklets: int, num_parameters: int, job: bytes, were_written: bool = False
) -> Records:
    """Read commit.bin.

    Args:
        folder: The rank's first folder.
        num_tasklets: Number of tasklets.
        num_parameters: Number of parameters.
        job: As for :func:`write_record`.
        were_written: Whether something was written to both halves for certain.

    Raises:
        StorageError: The file cannot be read.
    """
    size = record_bytes(num_tasklets, num_parameters)
    path = folder.path / COMMIT_NAME
    problem = f"A commit record in {str(path)!r} was torn by a power loss or damaged since."
    with storage_errors("Reading the commit record", path), folder.reader(COMMIT_NAME) as file:
        if os.fstat(file.fileno()).st_size < _length(num_tasklets, num_parameters):
            return Records([], None)  # a damaged manifest may give a size beyond this machine's memory
        halves = file.read(size), file.read(size)
    found = [decode_record(half, num_tasklets=num_tasklets, num_parameters=num_parameters, job=job) for half in halves]
    # A record in the other half does not count: a disk has put it in the wrong place.
    intact = [record for number, record in enumerate(found) if record is not None and record.generation % 2 == number]
    intact.sort(key=lambda record: record.generation, reverse=True)
    written = 2 if were_written else intact[0].generation + 1 if intact else 0  # generations, in alternating halves
    num_empty = sum(half == bytes(size) for half in halves)
    num_erased = sum(half.startswith(_ERASED) for half in halves)
    # Halves may be empty only until both were written.
    whole = len(intact) + num_erased + min(num_empty, max(2 - written, 0)) == 2
    return Records(intact, None if whole else problem)


def encode_record(record: CommitRecord, *, job: bytes) -> bytes:
    """Return a record's content."""
    body = b"".join(
        (
            record.tasklet_generations.astype("<i8").tobytes(),
            record.steps.astype("<i8").tobytes(),
            record.placement.positions.astype("<u4").tobytes(),
            record.placement.devices.astype("<u2").tobytes(),
        )
    )
    num_tasklets, num_parameters = len(record.tasklet_generations), len(record.steps)
    length = _length(num_tasklets, num_parameters)
    return _FORMAT.pack(num_parameters, job, record.generation, num_tasklets, length, body=body)


def decode_record(content: bytes, *, num_tasklets: int, num_parameters: int, job: bytes) -> CommitRecord | None:
    """Return the record at the start of ``content``; None if it is absent, incomplete, damaged or another store's."""
    length = _length(num_tasklets, num_parameters)
    fields, body = _FORMAT.unpack(content[:length])
    if (*fields[:2], *fields[3:]) != (num_parameters, job, num_tasklets, length):
        return None
    generations, steps, positions, devices = _columns(body, num_tasklets, num_parameters)
    return CommitRecord(
        generation=fields[2],
        placement=Placement(devices.astype(np.uint16), positions.astype(np.uint32)),
        tasklet_generations=generations.astype(np.int64),
        steps=steps.astype(np.int64),
    )


def _columns(body: bytes, num_tasklets: int, num_parameters: int) -> Iterator[NDArray[np.generic]]:
    begin = 0
    for kind, count in (("<i8", num_tasklets), ("<i8", num_parameters), ("<u4", num_tasklets), ("<u2", num_tasklets)):
        column = np.frombuffer(body, kind, count, begin)
        yield column
        begin += column.nbytes


def _record_offset(record: CommitRecord) -> int:
    return (record.generation % 2) * record_bytes(len(record.tasklet_generations), len(record.steps))
