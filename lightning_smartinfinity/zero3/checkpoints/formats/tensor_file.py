"""Files of ``torch.save`` whose large tensors are read and written part by part, with bounded memory and page cache.

``torch.save`` writes a zip archive with one stored (uncompressed) record per storage. Its ``skip_data`` mode omits the
records' bytes; this module writes them afterwards, together with each record's CRC-32 in the archive. The result is an
ordinary file of ``torch.save``. Streams verify the CRC-32 of every record that they read completely.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor

from lightning_smartinfinity.common.fake_tensors import fake_tensors
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.io.deadlines import doing_now
from lightning_smartinfinity.storage.io.files import OpenFile, bounded, limited
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_without_memory, require_file
from lightning_smartinfinity.zero3.untyped import Pickled

__all__ = [
    "PERMISSION_REMEDY",
    "ZIP_DAMAGE",
    "TensorFile",
    "TensorStream",
    "check_records",
    "refused",
    "room_for",
    "saved_with_room",
]

PERMISSION_REMEDY = "Give this user permission to read it."

ZIP_DAMAGE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    ArithmeticError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""Errors that ``zipfile`` raises on a damaged archive."""

_CACHED_BYTES = 32 * 1024 * 1024
_FP32_BYTES = 4
_READ_BYTES = 1024 * 1024
_RECORD_FOLDER = "/data/"
_DIRECTORY_ENTRY = struct.Struct("<28xHHH12x")  # lengths of the name, extra field and comment that follow
_ENTRY_MAGIC = b"PK\x01\x02"
_CRC_IN_ENTRY = 16
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x08
_IS_FOLDER = 0x10  # of a record's external attributes


def room_for(numel: int) -> torch.Tensor:
    """Return an fp32 tensor without memory, for which :func:`saved_with_room` reserves room in the file."""
    with fake_tensors():
        return torch.empty(numel, dtype=torch.float32)


class TensorStream:
    """Consecutive tensors of a file as one run of fp32 values, written or read from first to last.

    Args:
        file: File that holds the tensors.
        records: Records of the tensors.
    """

    def __init__(self, file: TensorFile, records: Sequence[_Record]) -> None:
        self._file = file
        self._records = [record for record in records if record.nbytes]
        self._ends = list(accumulate(record.nbytes for record in self._records))
        self._index = self._done = self._checksum = 0

    def write(self, values: NDArray[np.float32]) -> None:
        """Write the next values; a tensor's last values also write its checksum."""
        for record, part in self._parts(values.data.cast("B")):
            self._file.write_all(part, record.offset + self._done)
            self._advance(part)
            if self._done == record.nbytes:
                self._file.write_checksum(record, self._checksum)
                self._next()

    def read(self, values: NDArray[np.float32]) -> None:
        """Fill the array with the next values.

        Raises:
            CheckpointError: The file is damaged; detected when a tensor's last values are read.
        """
        for record, part in self._parts(values.data.cast("B")):
            self._file.read_at(record.offset + self._done, part)
            self._advance(part)
            if self._done == record.nbytes:
                self._file.check(record, self._checksum)
                self._next()

    @property
    def nbytes(self) -> int:
        """Size of all values, in bytes."""
        return self._ends[-1] if self._ends else 0

    def values(self, begin: int, end: int) -> NDArray[np.float32]:
        """Return a copy of elements ``[begin, end)``, cut at the end of the run and unverified.

        Raises:
            CheckpointError: The file ends too early.
        """
        at, last = (min(edge * _FP32_BYTES, self.nbytes) for edge in (begin, end))
        values = np.empty((last - at) // _FP32_BYTES, np.float32)
        content, index = values.data.cast("B"), bisect_right(self._ends, at)
        while content.nbytes:
            record, left = self._records[index], self._ends[index] - at
            part = content[:left]
            self._file.read_at(record.offset + record.nbytes - left, part)
            content, at, index = content[part.nbytes :], at + part.nbytes, index + 1
        return values

    def _parts(self, content: memoryview) -> Iterator[tuple[_Record, memoryview]]:
        while content.nbytes:
            record = self._records[self._index]
            part = content[: record.nbytes - self._done]
            yield record, part
            content = content[part.nbytes :]

    def _advance(self, part: memoryview) -> None:
        self._checksum = zlib.crc32(part, self._checksum)
        self._done += part.nbytes

    def _next(self) -> None:
        self._index, self._done, self._checksum = self._index + 1, 0, 0


class TensorFile(OpenFile):
    """An open file of ``torch.save``.

    Args:
        path: Path of the file.
        writable: Whether its tensors may be written.

    Attributes:
        state: The saved object; its tensors have no memory.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.state: Pickled = load_without_memory(path, written_here=writable)
        self._infos, self._entry_offsets = _directory(path)
        self._header_offsets = [info.header_offset for info in self._infos]
        super().__init__(path, os.O_RDWR if writable else os.O_RDONLY, cached_bytes=_CACHED_BYTES)

    def stream(self, tensors: Sequence[torch.Tensor]) -> TensorStream:
        """Return a stream over consecutive contiguous fp32 tensors of :attr:`state`."""
        return TensorStream(self, [self._record(tensor) for tensor in tensors])

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write the storage of ``values`` for a tensor of :attr:`state`; the storage may be larger than the tensor."""
        storage = torch.empty(0, dtype=torch.uint8).set_(values.detach().cpu().untyped_storage())
        record = self._record(tensor)._replace(offset=_offset_of(tensor), nbytes=storage.numel())
        if record.nbytes:
            content = storage.numpy().data
            self.write_all(content, record.offset)
            self.write_checksum(record, zlib.crc32(content))

    def read(self, tensor: torch.Tensor, begin: int, values: torch.Tensor) -> None:
        """Fill ``values`` with consecutive elements of a contiguous tensor of :attr:`state`, unverified.

        Args:
            tensor: The tensor, of any dtype.
            begin: Index of the first element.
            values: Contiguous tensor of the same dtype in host memory.

        Raises:
            CheckpointError: The file ends too early.
        """
        offset = self._record(tensor).offset + begin * tensor.element_size()
        self.read_at(offset, values.view(torch.uint8).numpy().data)

    def unnamed(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of records that hold none of these tensors of :attr:`state`."""
        named = {self._record(tensor).info.filename for tensor in tensors}
        return {info.filename for info in self._infos if _RECORD_FOLDER in info.filename} - named

    def read_at(self, offset: int, content: memoryview) -> None:
        """Fill the whole content from an offset of the file.

        Raises:
            CheckpointError: The file ends too early.
        """
        if self.read_all(content, offset) < content.nbytes:
            raise CheckpointError(f"{self.path} is damaged: it was cut short.", "Use another checkpoint.")

    def write_checksum(self, record: _Record, checksum: int) -> None:
        """Write a record's CRC-32 to the two places of a zip archive: after the record, and in the final directory."""
        limited("Writing", self.path, self._write_checksum, record, checksum)

    def _write_checksum(self, record: _Record, checksum: int) -> None:
        field = checksum.to_bytes(4, "little")
        end = record.offset + record.nbytes
        if record.info.flag_bits & _HAS_DESCRIPTOR and os.pread(self.descriptor, 4, end) == _DESCRIPTOR_MAGIC:
            self.write_all(memoryview(field), end + len(_DESCRIPTOR_MAGIC))
        self.write_all(memoryview(field), self._entry_offsets[record.info.filename] + _CRC_IN_ENTRY)

    def check(self, record: _Record, checksum: int) -> None:
        """Compare a checksum with the CRC-32 in the archive, unless the tensor covers only a part of its record.

        Raises:
            CheckpointError: The checksums differ.
        """
        if record.nbytes == record.info.file_size and checksum != record.info.CRC:
            raise CheckpointError(
                f"{self.path} is damaged: the checksum of {record.info.filename} is wrong.", "Use another checkpoint."
            )

    def _record(self, tensor: torch.Tensor) -> _Record:
        begin = _offset_of(tensor)
        info = self._infos[bisect_left(self._header_offsets, begin) - 1]
        size = tensor.element_size()
        return _Record(info, begin + int(tensor.storage_offset()) * size, tensor.numel() * size)


@bounded("Reading")
def _directory(path: Path) -> tuple[list[zipfile.ZipInfo], dict[str, int]]:
    """Return the entries of an archive in their order, and the offset of each record's entry in the directory."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        infos, at = sorted(archive.infolist(), key=lambda info: info.header_offset), archive.start_dir
        file.seek(at)
        directory, entries = memoryview(file.read()), {}
    while directory[:4] == _ENTRY_MAGIC:
        sizes = _DIRECTORY_ENTRY.unpack_from(directory)
        name = bytes(directory[_DIRECTORY_ENTRY.size : _DIRECTORY_ENTRY.size + sizes[0]]).decode()
        nbytes = _DIRECTORY_ENTRY.size + sum(sizes)
        entries[name], directory, at = at, directory[nbytes:], at + nbytes
    return infos, entries


class _Record(NamedTuple):
    """The place of a tensor's bytes in the file."""

    info: zipfile.ZipInfo
    offset: int
    nbytes: int


def saved_with_room(state: object, path: Path) -> TensorFile:
    """Save as ``torch.save`` does, except for the values of tensors from :func:`room_for`, to be written later.

    Raises:
        CheckpointError: A tensor in ``state`` is inside an object that is not a dictionary, list or tuple.
    """
    limited("Writing", path, _save_without_data, state, path)
    file = TensorFile(path, writable=True)
    try:
        saved = list(_tensors_in(file.state))
        for given, tensor in zip(_tensors_in(state), saved, strict=True):
            if not isinstance(given, FakeTensor):
                file.put(tensor, given)
        if file.unnamed(saved):
            raise CheckpointError(
                f"{path} was to hold tensors inside of objects that are neither dictionaries nor lists.",
                "Keep only numbers, tensors and lists of them in the optimizer's parameter groups.",
            )
    except BaseException:
        file.close()
        raise
    return file


def _save_without_data(state: object, path: Path) -> None:
    # Given the path instead of a file, torch would hold the interpreter's lock while a disk does not answer.
    with torch.serialization.skip_data(materialize_fake_tensors=True), open(path, "wb") as file:
        torch.save(state, file)


@bounded("Reading")
def check_records(
    path: Path, *, tensors: bool, but: Collection[str] = (), remedy: str = "Use another checkpoint."
) -> None:
    """Verify the CRC-32s in a file of ``torch.save``, and that torch reads all of its records.

    Args:
        path: Path of the file.
        tensors: Whether to also read the tensors' values; if not, only the other records.
        but: Names of records to leave out.
        remedy: Remedy for a damaged file, for the error.

    Raises:
        CheckpointError: A checksum is wrong, ``torch.save`` did not write the file, or this user may not read it.
        StorageTimeoutError: The disk does not answer.
    """
    require_file(path)
    try:
        if path.stat().st_size == 0:
            raise zipfile.BadZipFile("it is empty")
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.external_attr & _IS_FOLDER and info.file_size:  # zipfile would read it
                    raise zipfile.BadZipFile(f"{info.filename} is marked as a folder, of which torch reads nothing")
                if info.filename not in but and (tensors or _RECORD_FOLDER not in info.filename):
                    with doing_now("Reading", path):
                        _read_through(archive, info)
    except PermissionError as error:
        raise refused(path, error) from error
    except ZIP_DAMAGE as error:
        raise CheckpointError(f"{path} is damaged: {error}.", remedy) from error


def refused(path: Path, error: PermissionError) -> CheckpointError:
    """Return the error for a file that this user may not read; whether it is damaged is unknown."""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}.", PERMISSION_REMEDY)


def _read_through(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    with archive.open(info) as record:
        while record.read(_READ_BYTES):
            pass


def _tensors_in(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors_in(value)


def _offset_of(tensor: torch.Tensor) -> int:
    """Return the offset of the tensor's storage, which torch records when it loads tensors without memory."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, "only tensors of TensorFile.state have a place in a file"
    return offset
