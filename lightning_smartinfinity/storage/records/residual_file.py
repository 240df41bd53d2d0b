"""The file of the residual of compressed gradients that belongs to a training record.

A residual is as large as the gradients in fp32, so it is written while training goes on. residual-0.bin and
residual-1.bin alternate as the records do: the residual of record ``n`` is in file ``n % 2``. A file, little endian::

    f32[numel]  the residual
                zeros up to whole blocks
    8 bytes     magic LSIRES01
    u32         version (1)
    u32         rank
    16 bytes    job id, as in the extents
    16 bytes    id of the run, as in the record
    i64         number of the record
    u64         numel
    u32[...]    CRC32C of each 4 MiB of the residual
    u32         CRC32C of everything from the magic on
                zeros up to whole blocks

The part from the magic on, the end of the file, is written last. A process that is killed during the write leaves the
end of an older residual, or zeros, so the file does not count as this record's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import Advance
from lightning_smartinfinity.errors import StorageCorruptError
from lightning_smartinfinity.storage.folders.direct import has_direct
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.rank_folder import RESIDUAL_NAMES
from lightning_smartinfinity.storage.io.files import transfer_all
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.sealed import RecordFormat, crc32c
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks

__all__ = [
    "ResidualOf",
    "damaged_parts",
    "part_checksums",
    "read_residual",
    "residual_bytes",
    "was_cut_short",
]

_FORMAT = RecordFormat(b"LSIRES01", 1, "I16s16sqQ")
_CRC_BYTES = _ITEM_BYTES = 4
_PART_BYTES = 4 << 20  # per checksum


@dataclass(frozen=True, kw_only=True)
class ResidualOf:
    """Identifies the residual in a file.

    Args:
        identity: Identity of the store, as in its extents.
        run: Run of the training record.
        number: Number of the training record.
        numel: Number of values.
    """

    identity: native.Identity
    run: bytes
    number: int
    numel: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return RESIDUAL_NAMES[self.number % len(RESIDUAL_NAMES)]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return _ITEM_BYTES * self.numel

    @property
    def end_offset(self) -> int:
        """Offset of the end of the file, in bytes."""
        return whole_blocks(self.nbytes)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return _file_bytes(self.numel)

    @property
    def _fields(self) -> tuple[object, ...]:
        return self.identity.rank, self.identity.job, self.run, self.number, self.numel

    def end(self, checksums: NDArray[np.uint32]) -> bytes:
        """Return the content of the end of the file, without padding."""
        return _FORMAT.pack(*self._fields, body=checksums.astype("<u4").tobytes())

    def checksums_in(self, end: bytes) -> NDArray[np.uint32] | None:
        """Return the checksums in the end of a file; None if it is damaged or belongs to another residual."""
        fields, checksums = _FORMAT.unpack(end[: _end_bytes(self.numel)])
        return np.frombuffer(checksums, "<u4") if fields == self._fields else None

    def is_older(self, end: bytes) -> bool:
        """Return whether the end of a file is from before this residual's write: another residual's, or all zeros."""
        return not any(end) or _FORMAT.unpack(end[: _end_bytes(self.numel)])[0] not in ((), self._fields)


def part_checksums(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the CRC32C of each 4 MiB of a residual."""
    data = values.view(np.uint8)
    return np.array([crc32c(data[at : at + _PART_BYTES]) for at in range(0, data.size, _PART_BYTES)], np.uint32)


def residual_bytes(numel: int) -> int:
    """Return the bytes of both files, for residuals of ``numel`` values."""
    return len(RESIDUAL_NAMES) * _file_bytes(numel)


def was_cut_short(folder: OpenFolder, residual: ResidualOf) -> bool:
    """Return whether the write of a residual was interrupted, as by a kill. Its values are not read.

    Raises:
        StorageError: The file cannot be read.
    """
    end = _read_end(folder, residual)
    return end is not None and residual.is_older(end)


def damaged_parts(
    folder: OpenFolder,
    residual: ResidualOf,
    *,
    into: NDArray[np.float32] | None = None,
    advance: Advance = lambda nbytes: None,
) -> Iterator[str]:
    """Read a residual, with direct I/O where possible, and yield a sentence about each damaged part.

    Args:
        folder: The rank's first folder.
        residual: Which residual.
        into: float32[numel] for the values; None to only compare them with their checksums.
        advance: Called with the number of bytes of each part.

    Raises:
        StorageError: The file cannot be read.
    """
    path, end = folder.path / residual.name, _read_end(folder, residual)
    checksums = None if end is None else residual.checksums_in(end)
    if checksums is None:
        yield f"{str(path)!r} does not hold the whole residual that belongs to training record {residual.number}."
        return
    with storage_errors("Opening", path):
        direct = has_direct(folder, residual.name)
        descriptor = folder.open(residual.name, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        buffer = np.frombuffer(native.HostBuffer(_PART_BYTES).memoryview(), np.uint8)
        target = None if into is None else into.view(np.uint8)

        def read(part: memoryview, offset: int) -> int:
            return os.preadv(descriptor, [part], offset)

        for offset, checksum in zip(range(0, residual.nbytes, _PART_BYTES), checksums, strict=True):
            stop = min(offset + _PART_BYTES, residual.nbytes)
            with storage_errors("Reading", path):
                num_read = transfer_all(read, buffer[: whole_blocks(stop - offset)].data, offset)
            part = buffer[: stop - offset]
            if num_read < part.size or crc32c(part) != checksum:
                yield f"The residual of compressed gradients at offset {offset} of {str(path)!r} is damaged."
            if target is not None:
                target[offset:stop] = part
            advance(part.size)
    finally:
        os.close(descriptor)


def read_residual(folder: OpenFolder, residual: ResidualOf, into: NDArray[np.float32]) -> None:
    """Read a residual.

    Args:
        folder: The rank's first folder.
        residual: Which residual.
        into: float32[numel] for the values.

    Raises:
        StorageCorruptError: The residual is damaged.
        StorageError: The file cannot be read.
    """
    for problem in damaged_parts(folder, residual, into=into):
        raise StorageCorruptError(problem, "Check the device, and resume from a checkpoint.")


def _num_parts(numel: int) -> int:
    return -(-_ITEM_BYTES * numel // _PART_BYTES)


def _end_bytes(numel: int) -> int:
    return _FORMAT.empty_bytes + _CRC_BYTES * _num_parts(numel)


def _file_bytes(numel: int) -> int:
    return whole_blocks(_ITEM_BYTES * numel) + whole_blocks(_end_bytes(numel))


def _read_end(folder: OpenFolder, residual: ResidualOf) -> bytes | None:
    """Return the end of a residual's file, with padding; None if the file is missing or too short."""
    with storage_errors("Reading", folder.path / residual.name):
        status = folder.status(residual.name)
        if status is None or status.st_size < residual.file_bytes:
            return None
        with folder.reader(residual.name) as file:
            file.seek(residual.end_offset)
            end = file.read(residual.file_bytes - residual.end_offset)
    return end if len(end) == residual.file_bytes - residual.end_offset else None
