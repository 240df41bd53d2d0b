"""Finds the xclbin with the kernels, and reads its header."""

from __future__ import annotations

import os
import stat
import struct
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lightning_smartinfinity.devices.smartssd.discovery.system import System
from lightning_smartinfinity.errors import ConfigError, DeviceError
from lightning_smartinfinity.settings import SmartSSDConfig
from lightning_smartinfinity.settings.smartssd import BUILD_REMEDY, NamedXclbin, require_xclbin_named

__all__ = ["Xclbin", "read_xclbin"]

_MAGIC = b"xclbin2\0"
# Defined in XRT's xclbin.h: struct axlf up to its sections, then axlf_section_header, mem_topology and mem_data.
_HEADER = struct.Struct("<8s296xQ40x64s16s16xI4x")
_SECTION = struct.Struct("<I20xQQ")
_COUNT = struct.Struct("<i4x")
_BANK = struct.Struct("<BB6xQ24x")
# struct ip_data, the entries of ip_layout, which begins like mem_topology.
_UNIT = struct.Struct("<I12x64s")
_KERNEL = 1
_MEM_TOPOLOGY = 6
_IP_LAYOUT = 8
_MOST_SECTIONS = 1024


class _Section(NamedTuple):
    kind: int
    offset: int
    nbytes: int


class Xclbin(NamedTuple):
    """A file that XRT can load.

    Args:
        path: Absolute path.
        uuid: Identifier of this build, which must be equal in all processes that use one card.
        platform: Target platform of the build.
        memory_bytes: Size of the card's largest memory bank; ``None`` if the header does not state it.
        kernels: Names of its kernels.
    """

    path: Path
    uuid: str
    platform: str
    memory_bytes: int | None
    kernels: tuple[str, ...]


def read_xclbin(settings: SmartSSDConfig | None, system: System) -> Xclbin:
    """Find the file and read its header.

    Raises:
        ConfigError: No file is named, or the file cannot be read.
        DeviceError: The file is not an xclbin, or is truncated.
    """
    named = require_xclbin_named(settings, system.environment)
    try:
        with open(named.path, "rb", opener=_open_regular) as file:
            return _read(file, named)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The xclbin {named.setting} cannot be read: {error}.", BUILD_REMEDY) from error


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file; raise ValueError for others, because reading from a pipe could block forever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return descriptor


def _read(file: BinaryIO, named: NamedXclbin) -> Xclbin:
    header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise DeviceError(f"The file {named.setting} is no xclbin.", BUILD_REMEDY)
    nbytes = os.fstat(file.fileno()).st_size
    try:
        _, length, platform, build, num_sections = _HEADER.unpack(header)
        sections = _sections(file, num_sections)
        # XRT uses these offsets without checking them.
        if length > nbytes or any(section.offset + section.nbytes > nbytes for section in sections):
            raise struct.error("an offset beyond the end")
        banks = [1024 * kib for _, used, kib in _entries(file, sections, _MEM_TOPOLOGY, _BANK) if used]
        units = [_text(name) for kind, name in _entries(file, sections, _IP_LAYOUT, _UNIT) if kind == _KERNEL]
    except struct.error as error:
        problem = f"The xclbin {named.setting} is truncated: its header declares more than its {nbytes} bytes."
        raise DeviceError(problem, BUILD_REMEDY) from error
    kernels = tuple(dict.fromkeys(unit.split(":")[0] for unit in units))  # a unit is called <kernel>:<instance>
    memory = max(banks, default=None)
    return Xclbin(named.path, str(uuid.UUID(bytes=build)), _text(platform), memory, kernels)


def _text(padded: bytes) -> str:
    return padded.split(b"\0", 1)[0].decode(errors="replace")


def _sections(file: BinaryIO, count: int) -> list[_Section]:
    """Read the section headers from a file that is positioned after the header."""
    if count > _MOST_SECTIONS:
        raise struct.error(f"{count} sections")
    return [_Section(*_SECTION.unpack(file.read(_SECTION.size))) for _ in range(count)]


def _entries(
    file: BinaryIO, sections: Sequence[_Section], kind: int, entry: struct.Struct
) -> Iterator[tuple[Any, ...]]:
    """Yield the entries of each section of this kind; a section begins with its number of entries."""
    for section in sections:
        if section.kind == kind:
            file.seek(section.offset)
            content = file.read(section.nbytes)
            (count,) = _COUNT.unpack_from(content)
            for index in range(count):
                yield entry.unpack_from(content, _COUNT.size + index * entry.size)
