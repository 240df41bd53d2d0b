"""The common form of records: magic and version, fields, a body, and the CRC32C of all that (u32, little endian).

All versions of a record begin with the magic and the version, and end with that checksum. So a record of an unknown
version is distinguished from a damaged one.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from lightning_smartinfinity import native

__all__ = ["RecordFormat", "crc32c", "version_in"]

_BEGIN = struct.Struct("<8sI")


def crc32c(content: Any) -> int:
    """Return the CRC32C of a buffer."""
    values = np.frombuffer(content, np.uint8)
    return native.crc32c(values.ctypes.data, values.nbytes)


def version_in(record: bytes, magic: bytes) -> int | None:
    """Return the version of an intact record with this magic; None if the record is damaged or of another kind."""
    if len(record) < _BEGIN.size + 4 or crc32c(record[:-4]) != int.from_bytes(record[-4:], "little"):
        return None
    found, version = _BEGIN.unpack_from(record)
    return int(version) if found == magic else None


class RecordFormat:
    """Packs and unpacks records of one kind, given magic, version, and the fields in the notation of ``struct``."""

    def __init__(self, magic: bytes, version: int, fields: str) -> None:
        self._begin, self._header = (magic, version), struct.Struct("<8sI" + fields)
        self.header_bytes = self._header.size
        self.empty_bytes = self.header_bytes + 4  # of a record without a body

    def pack(self, *fields: object, body: bytes) -> bytes:
        """Return a record."""
        content = self._header.pack(*self._begin, *fields) + body
        return content + crc32c(content).to_bytes(4, "little")

    def unpack(self, record: bytes) -> tuple[tuple[Any, ...], bytes]:
        """Return the fields and the body of a record; no fields if it is damaged or not of this format."""
        if len(record) < self.empty_bytes or version_in(record, self._begin[0]) != self._begin[1]:
            return (), b""
        return self._header.unpack_from(record)[2:], record[self.header_bytes : -4]
