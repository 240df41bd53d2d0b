"""Tests the reader of Vitis HLS's reports, with a report of the form that Vitis HLS 2022 and 2023 write."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from hls import csynth
from hls.csynth import CsynthReport, read_csynth
from hls.sources import write_sources
from lightning_smartinfinity.errors import DeviceError

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
    loops = f"<groups><PipelineII>{groups}</PipelineII></groups>"
    module = "<Module><Name>store_parameter</Name><PerformanceEstimates><SummaryOfLoopLatency>"
    module += f"{loops}</SummaryOfLoopLatency></PerformanceEstimates></Module>"
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
    headers = Path(csynth.__file__).parent / "include"
    texts = [path.read_text() for path in headers.glob("*.hpp")]
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
