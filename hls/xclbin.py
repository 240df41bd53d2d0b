"""Writes the xclbin for tests: the parts of a design that XRT reads, without a bitstream.

The layout is that of XRT's ``xclbin.h``. Four sections let XRT 2.13 open kernels, set arguments by name and index,
choose memory banks and number compute units.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from enum import IntEnum
from xml.etree import ElementTree as Xml

from hls.description import Argument, Design, Kernel

__all__ = ["Section", "SectionKind", "sections", "xclbin"]

_HEADER = struct.Struct("<8si28s256sQ" + "QQQHBBHH16s64s16s16sI4x")
_SECTION_HEADER = struct.Struct("<I16s4xQQ")
_ALIGNMENT = 8
_XRT_VERSION = (2, 13, 466)

_IP_KERNEL = 1
_INTERRUPT_ENABLED = 1
_MEMORY_DDR4 = 1
_CONTROL_PORT = "S_AXI_CONTROL"
_FIRST_REGISTERS = 0x180_0000
_REGISTERS_BYTES = 0x1_0000


class SectionKind(IntEnum):
    """The kinds of sections that are written (``axlf_section_kind``)."""

    EMBEDDED_METADATA = 2
    MEM_TOPOLOGY = 6
    CONNECTIVITY = 7
    IP_LAYOUT = 8


@dataclass(frozen=True)
class Section:
    """A section and its bytes."""

    kind: SectionKind
    content: bytes


def xclbin(design: Design) -> bytes:
    """Return the file's content; equal designs give equal bytes and uuids, different designs different ones."""
    parts = sections(design)
    body, headers = b"", b""
    first = _HEADER.size + len(parts) * _SECTION_HEADER.size
    for part in parts:
        body += bytes(-(first + len(body)) % _ALIGNMENT)
        headers += _SECTION_HEADER.pack(part.kind, b"", first + len(body), len(part.content))
        body += part.content
    identity = uuid.uuid5(uuid.NAMESPACE_OID, body.hex())
    major, minor, patch = _XRT_VERSION
    header = _HEADER.pack(
        *(b"xclbin2", -1, b"\xff" * 28, b"", 0),
        *(first + len(body), 0, 0, patch, major, minor, 0, 0, b""),
        *(design.platform.vbnv.encode(), identity.bytes, b"", len(parts)),
    )
    return header + headers + body


def sections(design: Design) -> list[Section]:
    """Return the sections in the order in which they are written."""
    return [
        Section(SectionKind.EMBEDDED_METADATA, _metadata(design)),
        Section(SectionKind.MEM_TOPOLOGY, _mem_topology(design)),
        Section(SectionKind.CONNECTIVITY, _connectivity(design)),
        Section(SectionKind.IP_LAYOUT, _ip_layout(design)),
    ]


def _mem_topology(design: Design) -> bytes:
    bank = design.platform.bank
    used, num_banks = 1, 1
    size_kib = bank.size_bytes >> 10
    return struct.pack("<i4xBB6xQQ16s", num_banks, _MEMORY_DDR4, used, size_kib, bank.base, bank.name.encode())


def _connectivity(design: Design) -> bytes:
    """Connect every pointer of every compute unit with the only bank."""
    connections = [
        (argument_index, unit_index, 0)
        for unit_index, unit in enumerate(design.compute_units)
        for argument_index, argument in enumerate(unit.kernel.arguments)
        if argument.is_pointer
    ]
    return struct.pack("<i", len(connections)) + b"".join(struct.pack("<iii", *each) for each in connections)


def _ip_layout(design: Design) -> bytes:
    content = struct.pack("<i4x", len(design.compute_units))
    for index, unit in enumerate(design.compute_units):
        properties = _INTERRUPT_ENABLED | index << 1
        name = f"{unit.kernel.name}:{unit.name}".encode()
        content += struct.pack("<IIQ64s", _IP_KERNEL, properties, _registers(index), name)
    return content


def _registers(unit_index: int) -> int:
    return _FIRST_REGISTERS + unit_index * _REGISTERS_BYTES


def _metadata(design: Design) -> bytes:
    platform = design.platform
    project = Xml.Element("project", name="smart_infinity")
    vendor, board, name = platform.vbnv.split("_", 2)
    parent = Xml.SubElement(project, "platform", vendor=vendor, boardid=board, name=name, featureRomTime="0")
    Xml.SubElement(parent, "version", major="202110", minor="1")
    device = Xml.SubElement(parent, "device", name="fpga0", fpgaDevice=platform.part)
    core = Xml.SubElement(device, "core", name="OCL_REGION_0", target="bitstream", type="clc_region")
    clocks = Xml.SubElement(core, "kernelClocks")
    Xml.SubElement(clocks, "clock", port="KERNEL_CLK", frequency=f"{platform.clock_mhz}MHz")
    for kernel in design.kernels:
        _add_kernel(core, kernel, design)
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(project, encoding="unicode").encode()


def _add_kernel(core: Xml.Element, kernel: Kernel, design: Design) -> None:
    element = Xml.SubElement(
        core, "kernel", name=kernel.name, language="ip_c", type="pl", hwControlProtocol="ap_ctrl_hs", workGroupSize="1"
    )
    _add_port(element, _CONTROL_PORT, mode="slave", range="0x1000", dataWidth="32")
    for bundle in kernel.bundles:
        _add_port(element, _master(bundle), mode="master", range="0xFFFFFFFFFFFFFFFF", dataWidth="512")
    for index, (argument, offset) in enumerate(zip(kernel.arguments, kernel.register_offsets, strict=True)):
        _add_argument(element, index, argument, offset)
    for index, unit in enumerate(design.compute_units):
        if unit.kernel == kernel:
            instance = Xml.SubElement(element, "instance", name=unit.name)
            Xml.SubElement(instance, "addrRemap", base=hex(_registers(index)), range="0x1000", port=_CONTROL_PORT)


def _add_port(element: Xml.Element, name: str, **properties: str) -> None:
    Xml.SubElement(element, "port", {"name": name, "portType": "addressable", "base": "0x0", **properties})


def _add_argument(element: Xml.Element, index: int, argument: Argument, offset: int) -> None:
    size = hex(argument.register_bytes)
    Xml.SubElement(
        element,
        "arg",
        name=argument.name,
        addressQualifier="1" if argument.is_pointer else "0",
        id=str(index),
        port=_master(argument.bundle) if argument.is_pointer else _CONTROL_PORT,
        size=size,
        offset=hex(offset),
        hostOffset="0x0",
        hostSize=size,
        type="void*" if argument.is_pointer else "uint",
    )


def _master(bundle: str) -> str:
    return f"M_AXI_{bundle.upper()}"
