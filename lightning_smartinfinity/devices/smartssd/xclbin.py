"""The kernels' xclbin: which file it is, and what its header says."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lightning_smartinfinity.config import SmartSSDConfig
from lightning_smartinfinity.devices.smartssd.system import System
from lightning_smartinfinity.errors import ConfigError, DeviceError

__all__ = [
    "BUILD_REMEDY",
    "XCLBIN_VARIABLE",
    "Xclbin",
    "named_xclbin",
    "read_xclbin",
    "require_xclbin_named",
]

XCLBIN_VARIABLE = "SMART_INFINITY_XCLBIN"

BUILD_REMEDY = (
    "Build it with `make -C hls xclbin` in a checkout or source distribution of this version (wheels have no hls/"
    " folder; Vitis 2021.2 to 2022.2, for the shell xilinx_u2_gen3x4_xdma_gc_2_202110_1) and pass"
    f" SmartSSDConfig(xclbin=...), or set {XCLBIN_VARIABLE}."
)

_MAGIC = b"xclbin2\0"
# Of XRT's xclbin.h: struct axlf up to its sections, then axlf_section_header, mem_topology and mem_data.
_HEADER = struct.Struct("<8s296xQ40x64s16s16xI4x")
_SECTION = struct.Struct("<I20xQQ")
_BANKS = struct.Struct("<i4x")
_BANK = struct.Struct("<BB6xQ24x")
_MEM_TOPOLOGY = 6
_MOST_SECTIONS = 1024


class _Section(NamedTuple):
    kind: int
    offset: int
    nbytes: int


class Xclbin(NamedTuple):
    """A file that XRT can load.

    Args:
        path: Absolute.
        uuid: Of this build: what two processes on one card must agree on.
        platform: It was built for.
        memory_bytes: Of the card's largest memory bank; None: it does not tell.
    """

    path: Path
    uuid: str
    platform: str
    memory_bytes: int | None


def named_xclbin(settings: SmartSSDConfig | None, system: System) -> str | Path | None:
    """What the settings name, or the environment; None: neither does."""
    named = settings.xclbin if settings is not None else None
    return named or system.environment.get(XCLBIN_VARIABLE) or None


def read_xclbin(settings: SmartSSDConfig | None, system: System) -> Xclbin:
    """Find the file and read its header.

    Raises:
        ConfigError: None is named, or it cannot be read.
        DeviceError: It is no xclbin, or a torn one.
    """
    path = require_xclbin_named(settings, system)
    try:
        with open(path, "rb") as file:
            return _read(file, path)
    except (OSError, ValueError) as error:
        problem = f"The xclbin SmartSSDConfig(xclbin={str(path)!r}) cannot be read: {error}."
        raise ConfigError(problem, BUILD_REMEDY) from error


def _read(file: BinaryIO, path: Path) -> Xclbin:
    header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise DeviceError(f"The file SmartSSDConfig(xclbin={str(path)!r}) is no xclbin.", BUILD_REMEDY)
    nbytes = os.fstat(file.fileno()).st_size
    try:
        _, length, platform, build, num_sections = _HEADER.unpack(header)
        sections = _sections(file, num_sections)
        # XRT follows them wherever they lead.
        if length > nbytes or any(section.offset + section.nbytes > nbytes for section in sections):
            raise DeviceError(_torn(path, nbytes), BUILD_REMEDY)
        memory = _largest_bank(file, sections)
    except struct.error as error:
        raise DeviceError(_torn(path, nbytes), BUILD_REMEDY) from error
    return Xclbin(path, str(uuid.UUID(bytes=build)), platform.split(b"\0", 1)[0].decode(errors="replace"), memory)


def _torn(path: Path, nbytes: int) -> str:
    return f"The xclbin SmartSSDConfig(xclbin={str(path)!r}) is torn: its header tells of more than its {nbytes} bytes."


def require_xclbin_named(settings: SmartSSDConfig | None, system: System | None = None) -> Path:
    """The absolute path that the settings or the environment name.

    Raises:
        ConfigError: Neither names one, or it cannot be a path.
    """
    named = named_xclbin(settings, system or System())
    if named is None:
        problem = "update_device='smartssd' needs the kernels' xclbin, and none is named."
        raise ConfigError(problem, BUILD_REMEDY)
    try:
        return Path(named).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, no current folder
        setting = f"{XCLBIN_VARIABLE}={str(named)!r}"
        if settings is not None and settings.xclbin:
            setting = f"SmartSSDConfig(xclbin={str(named)!r})"
        raise ConfigError(f"{setting} names no file: {error}", "Pass the path of an xclbin.") from error


def _sections(file: BinaryIO, count: int) -> list[_Section]:
    """The file is positioned behind the header."""
    if count > _MOST_SECTIONS:
        raise struct.error(f"{count} sections")
    return [_Section(*_SECTION.unpack(file.read(_SECTION.size))) for _ in range(count)]


def _largest_bank(file: BinaryIO, sections: Sequence[_Section]) -> int | None:
    """Bytes of the largest bank of the section of memories."""
    for section in sections:
        if section.kind == _MEM_TOPOLOGY:
            file.seek(section.offset)
            content = file.read(section.nbytes)
            (count,) = _BANKS.unpack_from(content)
            banks = [_BANK.unpack_from(content, _BANKS.size + index * _BANK.size) for index in range(count)]
            return max((1024 * kibibytes for _, used, kibibytes in banks if used), default=None)
    return None
