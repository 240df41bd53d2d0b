"""Tests the description of the kernels and what is generated from it."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import xor
from pathlib import Path

import numpy as np
import pytest

from hls.description import DESIGNS, EMULATED, KERNELS, SMARTSSD, ComputeUnit, Design, MemoryBank, design_for
from hls.resources import beat_columns, report
from hls.sources import write_sources
from hls.xclbin import SectionKind, sections, xclbin
from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.devices.smartssd.kernels import LARGEST_NUMEL

ADAMW, ADAGRAD, SGD = KERNELS[:3]


def test_arguments_come_in_the_order_of_the_contract() -> None:
    """Pointers come first, then the words that all kernels have, then the rule's.

    Registers begin at 0x10, with 8 bytes for a pointer, 4 for a word, and 4 reserved bytes after each, as Vitis lays
    them out.
    """
    assert [argument.name for argument in SGD.arguments] == [
        *("gradient", "master_in", "momentum_buffer_in", "master_out", "momentum_buffer_out", "parameter", "status"),
        *("numel", "first", "last", "gradient_form", "parameter_form", "active"),
        *("gradient_scale", "weight_decay", "buffer_coefficient", "gradient_coefficient", "nesterov_momentum", "lr"),
    ]
    assert [len(kernel.arguments) for kernel in KERNELS] == [24, 17, 19, 25]
    assert list(SGD.register_offsets) == [
        *(0x10 + 12 * pointer for pointer in range(7)),
        *(0x10 + 7 * 12 + 8 * word for word in range(12)),
    ]


def test_arrays_share_their_bundle_between_reading_and_writing() -> None:
    """Each master has at most one reader and one writer."""
    for kernel in KERNELS:
        uses = [(argument.bundle, argument.kind) for argument in kernel.arguments if argument.is_pointer]
        assert len(set(uses)) == len(uses)


def test_every_kernel_is_in_one_design() -> None:
    """Designs follow from the kernels and the memory bank; an emulated card has all kernels.

    All three kernels of the first design take 13 of 15 masters. Every kernel has its own number, by which a status
    tells whose it is. The package and the kernels refuse the same numbers of elements as too large.
    """
    assert [kernel for design in DESIGNS for kernel in design.kernels] == list(KERNELS) == list(EMULATED.kernels)
    for design, following in pairwise(DESIGNS):
        assert design.num_masters + len(following.kernels[0].bundles) > 15
    assert all(rule.kernel in [kernel.name for kernel in design_for(rule.name).kernels] for rule in RULES)
    assert SMARTSSD.num_masters == 13 and len({rule.number for rule in RULES}) == len(RULES)
    header = (Path(__file__).parents[2] / "hls/include/beats.hpp").read_text()
    assert re.findall(r"kLargestNumel = 1u << (\d+);", header) == [str(LARGEST_NUMEL.bit_length() - 1)]
    assert LARGEST_NUMEL.bit_count() == 1


@pytest.mark.parametrize(
    ("units", "told"),
    [
        # v++ would fail only after hours.
        (
            (*SMARTSSD.compute_units, ComputeUnit(ADAGRAD, "adagrad_update_2")),
            r"17 AXI masters on bank0, which takes 15 .*adagrad_update_2 4",
        ),
        # XRT finds compute units by name.
        ((ComputeUnit(SGD, "unit"), ComputeUnit(ADAGRAD, "unit")), "share a name"),
    ],
)
def test_designs_that_are_refused(units: tuple[ComputeUnit, ...], told: str) -> None:
    """Too many masters, and compute units that share a name, are refused at once."""
    with pytest.raises(ValueError, match=told):
        Design(SMARTSSD.platform, units)


def test_xclbin_holds_bank_connections_and_units() -> None:
    """An xclbin holds bank, connections and units as XRT's header lays them out.

    A design always gives the same bytes, and another design gives another uuid.
    """
    bank = MemoryBank("ddr", base=0x1000_0000, size_bytes=2 << 30)
    other = replace(SMARTSSD, platform=replace(SMARTSSD.platform, bank=bank))
    contents = {part.kind: part.content for part in sections(other)}
    assert struct.unpack_from("<i4xBB6xQQ16s", contents[SectionKind.MEM_TOPOLOGY])[3:5] == (2 << 20, 0x1000_0000)
    pointers = [sum(argument.is_pointer for argument in kernel.arguments) for kernel in SMARTSSD.kernels]
    assert struct.unpack_from("<i", contents[SectionKind.CONNECTIVITY])[0] == sum(pointers)
    assert len(contents[SectionKind.IP_LAYOUT]) == 8 + 3 * 80
    assert b'name="beta2"' in contents[SectionKind.EMBEDDED_METADATA]
    assert xclbin(SMARTSSD) == xclbin(SMARTSSD)
    assert xclbin(other)[416:432] != xclbin(SMARTSSD)[416:432]


def test_an_xclbin_has_the_protocol_of_the_sources(tmp_path: Path) -> None:
    """XRT takes the protocol from the xclbin, and v++ from the pragma, which differs from its default."""
    contents = {part.kind: part.content.decode(errors="replace") for part in sections(EMULATED)}
    told = re.findall(r'hwControlProtocol="(\w+)"', contents[SectionKind.EMBEDDED_METADATA])
    write_sources(tmp_path)
    sources = [(tmp_path / f"{kernel.name}.cpp").read_text() for kernel in EMULATED.kernels]
    written = [re.findall(r"#pragma HLS INTERFACE (ap_ctrl_\w+) port=return", source) for source in sources]
    assert written == [[protocol] for protocol in told] == [["ap_ctrl_hs"]] * len(EMULATED.kernels)


def test_sources_of_a_renamed_kernel_are_deleted(tmp_path: Path) -> None:
    """A build compiles every source of the folder. Files that were not generated stay."""
    write_sources(tmp_path)
    (tmp_path / "sgd_update.cpp").rename(tmp_path / "renamed_update.cpp")
    (tmp_path / "written.cpp").touch()
    write_sources(tmp_path)
    assert {file.stem for file in tmp_path.glob("*.cpp")} == {"written", *(kernel.name for kernel in KERNELS)}


# ---- the tables of the FPGA's resources that the kernels should take


ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_what_the_script_prints() -> None:
    assert report() in (ROOT / "docs/smartssd_kernels.md").read_text()


def test_networks_compute_the_checksum() -> None:
    """The counted columns give the CRC-32C of a beat: those of its set bits, with the register in the first word."""
    columns = beat_columns()
    beat = np.random.default_rng(0).integers(0, 1 << 32, 16, np.uint32)
    words = [int(word) for word in beat]
    words[0] ^= 0xFFFFFFFF
    taken = [columns[place][bit] for place, word in enumerate(words) for bit in range(32) if word >> bit & 1]
    assert reduce(xor, taken) ^ 0xFFFFFFFF == native.crc32c(beat.ctypes.data, beat.nbytes)
