"""Tests the description of the kernels and what is generated from it."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hls.card_build import compile_line, connectivity_config, link_line
from hls.description import DESIGNS, EMULATED, KERNELS, SMARTSSD, ComputeUnit, Design, MemoryBank, design_for
from hls.generate import main
from hls.sources import write_sources
from hls.xclbin import SectionKind, sections, xclbin
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
    bundles = {argument.name: argument.bundle for argument in ADAMW.arguments}
    assert bundles["gradient"] == bundles["status"] == "gmem0"
    assert bundles["exp_avg_in"] == bundles["exp_avg_out"] == "gmem2"
    assert bundles["parameter"] == "gmem4"


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


def test_config_names_every_compute_unit() -> None:
    """Two compute units of a kernel share one line."""
    pair = tuple(ComputeUnit(ADAMW, f"adamw_update_{number}") for number in (1, 2))
    config = connectivity_config(Design(SMARTSSD.platform, (*pair, ComputeUnit(SGD, "sgd_update_1"))))
    assert config.splitlines() == [
        "[connectivity]",
        "nk=adamw_update:2:adamw_update_1.adamw_update_2",
        "nk=sgd_update:1:sgd_update_1",
    ]


def test_lines_for_the_card_name_shell_kernel_and_files() -> None:
    """Each kernel is compiled from its source; all are linked with the config."""
    line = compile_line(SMARTSSD, ADAMW, target="hw", folder="out", output="new.xo")
    assert line[0] == "v++" and line[-1] == "out/sources/adamw_update.cpp"
    assert line[line.index("--platform") + 1] == "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
    assert line[line.index("--kernel") + 1] == "adamw_update"
    assert line[line.index("--output") + 1] == "new.xo"
    linked = link_line(SMARTSSD, target="hw_emu", folder="out", output="x.xclbin")
    assert linked[-3:] == [f"out/{kernel.name}.xo" for kernel in SMARTSSD.kernels]
    assert linked[linked.index("--config") + 1] == "out/smartssd.cfg"


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


def test_command_writes_files_and_prints_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that the Makefile calls write files and print lines."""
    main(["test-xclbin", str(tmp_path / "x.xclbin")])
    assert (tmp_path / "x.xclbin").read_bytes() == xclbin(EMULATED)
    main(["config", str(tmp_path / "smartssd.cfg")])
    assert (tmp_path / "smartssd.cfg").read_text() == connectivity_config(SMARTSSD)
    main(["link-line", "--output", "x.xclbin", "--folder", "out"])
    assert capsys.readouterr().out.split() == link_line(SMARTSSD, target="hw", folder="out", output="x.xclbin")


def test_sources_of_a_renamed_kernel_are_deleted(tmp_path: Path) -> None:
    """A build compiles every source of the folder. Files that were not generated stay."""
    write_sources(tmp_path)
    (tmp_path / "sgd_update.cpp").rename(tmp_path / "renamed_update.cpp")
    (tmp_path / "written.cpp").touch()
    write_sources(tmp_path)
    assert {file.stem for file in tmp_path.glob("*.cpp")} == {"written", *(kernel.name for kernel in KERNELS)}
