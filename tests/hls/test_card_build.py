"""Tests the description of the kernels, the build for the card, and the reader of Vitis HLS's reports.

The build has a v++ that only records how it was called.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from itertools import chain, pairwise
from operator import xor
from pathlib import Path

import numpy as np
import pytest

from hls import resources
from hls.csynth import CsynthReport, read_csynth
from hls.description import DESIGNS, EMULATED, KERNELS, SMARTSSD, ComputeUnit, Design, Kernel, MemoryBank, design_for
from hls.sources import write_sources
from hls.xclbin import SectionKind, sections, xclbin
from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.devices.smartssd.kernels import LARGEST_NUMEL
from lightning_smartinfinity.errors import DeviceError
from tests.helpers.waiting import PROCESS_LIMIT

ROOT = Path(__file__).parents[2]
SHELL = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"

FAKE = f"""#!{sys.executable}
import json, pathlib, sys
arguments = sys.argv[1:]
with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
pathlib.Path(arguments[arguments.index("--output") + 1]).write_text("built")
"""


class Toolchain:
    """Runs hls/Makefile, with the fake v++ first on PATH, and reads the arguments that it was called with."""

    def __init__(self, folder: Path) -> None:
        self.card, self._tools = folder / "card", folder / "tools"
        self._tools.mkdir()

    def install(self, vitis: str = FAKE) -> None:
        (self._tools / "v++").write_text(vitis)
        (self._tools / "v++").chmod(0o755)

    def make(self, *arguments: str, folder: str = "hls") -> subprocess.CompletedProcess[str]:
        """Run make, by default in hls/, where no other v++ can be found, in a process group of its own."""
        path = f"{self._tools}:{Path(sys.executable).parent}:/usr/bin:/bin"
        command = ["make", "-C", str(ROOT / folder), f"CARD={self.card}", *arguments]
        # These variables are for a make that another make calls, which this one is not.
        kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        return subprocess.run(
            command,
            env=kept | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
            start_new_session=True,
        )

    def calls(self) -> list[list[str]]:
        """Return the arguments of each call of v++ since the last time."""
        written = self._tools / "calls"
        lines = written.read_text().splitlines() if written.exists() else []
        written.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    toolchain = Toolchain(tmp_path)
    toolchain.install()
    return toolchain


def test_xclbin_compiles_every_kernel_and_links_them(toolchain: Toolchain) -> None:
    """Every call of v++ is complete and consistent with the description and with the other calls.

    Each step has its own folders for logs and temporary files below the build's, so steps may run side by side. A
    kernel's source rebuilds its object and the link, a header everything, as each step takes hours.
    """
    built = toolchain.make("-j4", "xclbin")
    assert built.returncode == 0, built.stderr
    xclbin = toolchain.card / "smart_infinity.xclbin"
    assert xclbin.exists() and f'SmartSSDConfig(xclbin="{xclbin}")' in built.stdout
    *compiled, linked = toolchain.calls()
    options = [_options(call) for call in compiled]
    assert {option["--kernel"] for option in options} == {kernel.name for kernel in SMARTSSD.kernels}
    for call, option in zip(compiled, options, strict=True):
        assert "--compile" in call and "--link" not in call
        assert f"void {option['--kernel']}(" in (ROOT / call[-1]).read_text()
        assert (Path(option["-I"]) / "card_kernels.hpp").exists() and {"hls/include", "hls/kernels"} <= set(call)
    assert "--link" in linked and "--compile" not in linked and Path(_options(linked)["--output"]).name == xclbin.name
    objects = {Path(part): Path(part).read_text() for part in linked if part.endswith(".xo")}
    assert objects == {toolchain.card / Path(option["--output"]).name: "built" for option in options}
    options.append(_options(linked))
    told = {(option["--target"], option["--platform"], option["--kernel_frequency"]) for option in options}
    assert told == {("hw", SHELL, str(SMARTSSD.platform.clock_mhz))}
    for kind in ("--temp_dir", "--log_dir", "--report_dir"):
        folders = {option[kind] for option in options}
        assert len(folders) == 4 and all(Path(folder).is_relative_to(toolchain.card) for folder in folders)
    # The link is told of every compute unit.
    lines = Path(_options(linked)["--config"]).read_text().splitlines()
    named = {line.removeprefix("nk=").split(":")[0]: line.split(":")[2].split(".") for line in lines[1:]}
    assert lines[0] == "[connectivity]" and named.keys() == {option["--kernel"] for option in options[:-1]}
    assert [name for names in named.values() for name in names] == [unit.name for unit in SMARTSSD.compute_units]
    for changed, steps in (
        ((), []),
        (("-W", "kernels/sgd_update.hpp"), ["sgd_update", "link"]),
        (("-W", "include/gradient.hpp"), [*named, "link"]),
    ):
        toolchain.make("xclbin", *changed)
        assert sorted(_options(call).get("--kernel", "link") for call in toolchain.calls()) == sorted(steps)


def test_an_xclbin_for_another_optimizer(toolchain: Toolchain) -> None:
    """OPTIMIZER= chooses the design that has its kernel."""
    assert toolchain.make("xclbin", "OPTIMIZER=rmsprop").returncode == 0
    compiled, linked = map(_options, toolchain.calls())
    assert compiled["--kernel"] == "rmsprop_update"
    assert Path(linked["--config"]).read_text().splitlines()[1:] == ["nk=rmsprop_update:1:rmsprop_update_1"]


def test_without_the_toolchain_it_says_what_it_takes(tmp_path: Path) -> None:
    """Without the toolchain the error says what is needed, not that a command was not found."""
    failed = Toolchain(tmp_path).make("xclbin")
    told = ("there is no v++ on PATH", "Vitis 2021.2 to 2023.1", SHELL)
    assert failed.returncode != 0 and all(words in failed.stderr for words in told)
    assert not (tmp_path / "card").exists()


@pytest.mark.parametrize(
    ("vitis", "status", "told"),
    [
        (FAKE + 'sys.exit("no licence")\n', 2, "no licence"),
        (f"#!{sys.executable}\n", 2, "adamw_update.xo"),  # it ends well without an object
        (FAKE + "import os, signal\nos.killpg(0, signal.SIGKILL)\n", -signal.SIGKILL, ""),
    ],
    ids=["fails", "writes nothing", "is killed"],
)
def test_a_step_that_does_not_end_well(toolchain: Toolchain, vitis: str, status: int, told: str) -> None:
    """It leaves nothing that looks built, also where make cannot remove it: the next make begins with it again.

    ``make xo`` of the checkout compiles every kernel, the smallest one first, and links nothing.
    """
    toolchain.install(vitis)
    failed = toolchain.make("xo")
    assert failed.returncode == status and told in failed.stderr
    assert list(toolchain.card.glob("*.xo")) == [] and len(toolchain.calls()) <= 1
    toolchain.install()
    assert toolchain.make("xo", "INSTALLED=", folder="").returncode == 0
    kernels = [_options(call)["--kernel"] for call in toolchain.calls()]
    assert kernels[0] == "sgd_update" and sorted(kernels) == sorted(kernel.name for kernel in SMARTSSD.kernels)
    assert {path.stem for path in toolchain.card.glob("*.xo")} == {*kernels}


def _options(call: list[str]) -> dict[str, str]:
    """Return the options of a call that have a value."""
    return {name: value for name, value in pairwise(call) if name.startswith("-")}


# ---- the reader of Vitis HLS's reports, with a report of the form that Vitis HLS 2022 and 2023 write


REPORT = """\
<profile>
  <UserAssignments><TopModelName>sgd_update</TopModelName></UserAssignments>
  <PerformanceEstimates>
    <PipelineType>dataflow</PipelineType>
    <SummaryOfLoopLatency>
      <blocks>
        <TripCount>64</TripCount><Latency>undef</Latency><PipelineII>undef</PipelineII>
        <place><TripCount>65536</TripCount><PipelineII>1</PipelineII></place>
      </blocks>
    </SummaryOfLoopLatency>
  </PerformanceEstimates>
  <AreaEstimates>
    <Resources>
      <BRAM_18K>129</BRAM_18K><DSP>52</DSP><FF>90000</FF><LUT>63000</LUT><URAM>32</URAM>
    </Resources>
    <AvailableResources><BRAM_18K>1968</BRAM_18K></AvailableResources>
  </AreaEstimates>
  <ModuleInformation>
    <Module>
      <Name>compute</Name>
      <PerformanceEstimates>
        <SummaryOfLoopLatency><beats><Name>beats</Name><PipelineII>9</PipelineII></beats></SummaryOfLoopLatency>
      </PerformanceEstimates>
      <AreaEstimates><Resources><LUT>11</LUT><FF>22</FF></Resources></AreaEstimates>
    </Module>
  </ModuleInformation>
</profile>
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "csynth.xml"
    path.write_text(REPORT)
    return path


def test_figures_are_those_of_the_whole_kernel(report: Path) -> None:
    """Modules have figures of their own, which are part of the kernel's; two halves make a block of 36 Kbit."""
    assert read_csynth(report) == CsynthReport(
        loops={"sgd_update/place": 1, "compute/beats": 9}, bram=65, uram=32, ff=90_000, lut=63_000, dsp=52
    )


@pytest.mark.parametrize(
    ("beats", "groups", "expected"),
    [
        (8, 16, {"reported": 16, "expected": 16, "loop": "store_parameter/groups"}),
        (9, 16, {"reported": 9, "expected": 8, "loop": "compute/beats"}),
        (9, 19, {"reported": 19, "expected": 16, "loop": "store_parameter/groups"}),
    ],
)
def test_the_interval_is_of_the_loop_that_is_furthest_behind(
    report: Path, beats: int, groups: int, expected: dict[str, object]
) -> None:
    """Each loop is compared with its own pragma: a loop of two beats may take twice as long as others."""
    module = (
        "<Module><Name>store_parameter</Name><PerformanceEstimates><SummaryOfLoopLatency><groups>"
        f"<PipelineII>{groups}</PipelineII></groups></SummaryOfLoopLatency></PerformanceEstimates></Module>"
    )
    text = REPORT.replace("</ModuleInformation>", f"{module}</ModuleInformation>")
    # A loop around a DATAFLOW region has no pragma of an interval.
    text = text.replace("<PipelineII>undef", "<PipelineII>65536")
    report.write_text(text.replace("<PipelineII>9", f"<PipelineII>{beats}"))
    assert read_csynth(report).ii == expected


@pytest.mark.parametrize(
    ("old", "new", "figure", "expected"),
    [
        ("PipelineII", "Other", "ii", {"reported": None, "expected": 8}),  # no pipelined loop
        ("<DSP>52</DSP>", "<DSP48E>52</DSP48E>", "dsp", 52),  # an older release
    ],
)
def test_reports_of_another_form(report: Path, old: str, new: str, figure: str, expected: object) -> None:
    """Figures that are missing are told, and those with an older name are found."""
    report.write_text(REPORT.replace(old, new))
    assert getattr(read_csynth(report), figure) == expected


def test_every_pipelined_loop_has_a_label_that_tells_its_interval(tmp_path: Path) -> None:
    """One label stands for one interval, and the sources that are generated have one pipelined loop each."""
    found: dict[str, set[str]] = {}
    loop = re.compile(r"\n( *(\w+):)?\n *for .*\n#pragma HLS PIPELINE II = (\d+)")
    texts = [path.read_text() for path in (ROOT / "hls/include").glob("*.hpp")]
    for _, label, interval in chain.from_iterable(map(loop.findall, texts)):
        found.setdefault(label, set()).add(interval)
    assert sum(text.count("HLS PIPELINE") for text in texts) == sum(len(loop.findall(text)) for text in texts)
    assert "" not in found and {len(intervals) for intervals in found.values()} == {1}
    write_sources(tmp_path)
    for source in tmp_path.glob("*.cpp"):
        assert [label for _, label, _ in loop.findall(source.read_text())] == ["beats"] and "beats" not in found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a log", r"csynth\.xml is no report of Vitis HLS: .*syntax error"),
        ("<profile/>", r"csynth\.xml is no report of Vitis HLS: .*no AreaEstimates/Resources/BRAM_18K"),
        (REPORT.replace("63000", "many"), r"csynth\.xml is no report of Vitis HLS: .*many"),
        (None, "No such file"),
    ],
)
def test_another_file_is_refused(report: Path, text: str | None, why: str) -> None:
    """The error names the file, says why it is no report, and where v++ leaves one."""
    report.unlink() if text is None else report.write_text(text)
    with pytest.raises(DeviceError, match=rf"{why}.*save-temps"):
        read_csynth(report)


# ---- the description of the kernels, and what is generated from it


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


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_arrays_share_their_bundle_between_reading_and_writing(kernel: Kernel) -> None:
    """Each master has at most one reader and one writer."""
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
    header = (ROOT / "hls/include/beats.hpp").read_text()
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
    assert b'name="beta2"' in contents[SectionKind.EMBEDDED_METADATA] and xclbin(SMARTSSD) == xclbin(SMARTSSD)
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


def test_the_page_has_what_the_script_prints() -> None:
    assert resources.report() in (ROOT / "docs/smartssd_kernels.md").read_text()


def test_networks_compute_the_checksum() -> None:
    """The counted columns give the CRC-32C of a beat: those of its set bits, with the register in the first word."""
    beat = np.random.default_rng(0).integers(0, 1 << 32, 16, np.uint32)
    words = [int(beat[0]) ^ 0xFFFFFFFF, *map(int, beat[1:])]
    columns = resources.beat_columns()
    taken = [columns[place][bit] for place, word in enumerate(words) for bit in range(32) if word >> bit & 1]
    assert reduce(xor, taken) ^ 0xFFFFFFFF == native.crc32c(beat.ctypes.data, beat.nbytes)
