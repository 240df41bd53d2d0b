"""Reads the report of Vitis HLS on one synthesised kernel, whose figures are compared with the computed ones."""

from __future__ import annotations

import re
import xml.etree.ElementTree as Xml
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hls.sources import COMPUTE_INTERVAL
from lightning_smartinfinity.errors import DeviceError

__all__ = ["CsynthReport", "read_csynth"]

# Vivado HLS called DSP `DSP48E`.
_FIGURES = {"bram": ("BRAM_18K",), "uram": ("URAM",), "ff": ("FF",), "lut": ("LUT",), "dsp": ("DSP", "DSP48E")}


@dataclass(frozen=True)
class CsynthReport:
    """Holds the figures that Vitis HLS estimates for a kernel before placement.

    Attributes:
        loops: Initiation interval that each pipelined loop reached, by ``module/loop``.
        bram: Blocks of 36 Kbit, as ``hls/resources.py`` counts them. Vitis HLS counts halves of them.
    """

    loops: Mapping[str, int]
    bram: int
    uram: int
    ff: int
    lut: int
    dsp: int

    @property
    def ii(self) -> dict[str, int | str | None]:
        """The initiation interval of the loop that exceeds the interval of its pragma most, or is nearest to it.

        Without a pipelined loop nothing is reported.
        """
        written = _written_intervals()
        expected = {loop: written[label] for loop in self.loops if (label := loop.rpartition("/")[2]) in written}
        if not expected:
            return {"reported": None, "expected": COMPUTE_INTERVAL}
        loop = max(expected, key=lambda loop: (self.loops[loop] / expected[loop], expected[loop]))
        return {"reported": self.loops[loop], "expected": expected[loop], "loop": loop}


def read_csynth(path: Path) -> CsynthReport:
    """Read ``csynth.xml``, or ``<kernel>_csynth.xml``, of a kernel.

    Raises:
        DeviceError: If the file is no such report.
    """
    try:
        root = Xml.parse(path).getroot()
        figures = {name: _figure(root, *tags) for name, tags in _FIGURES.items()}
        loops = dict(_loops(root))
    except (OSError, Xml.ParseError, ValueError) as error:
        raise DeviceError(
            f"{path} is no report of Vitis HLS: {error}.",
            "Pass the csynth.xml that v++ --compile --save-temps leaves below --temp_dir.",
        ) from error
    return CsynthReport(loops=loops, **figures | {"bram": -(-figures["bram"] // 2)})


def _written_intervals() -> dict[str, int]:
    """Return the interval in the pragma of each pipelined loop, by the loop's label."""
    loop = re.compile(r"^ *(\w+):\n *for .*\n#pragma HLS PIPELINE II = (\d+)", re.MULTILINE)
    headers = (path.read_text() for path in (Path(__file__).parent / "include").glob("*.hpp"))
    in_headers = {label: int(interval) for text in headers for label, interval in loop.findall(text)}
    return {"beats": COMPUTE_INTERVAL, **in_headers}  # beats is the loop of the generated sources


def _figure(root: Xml.Element, *tags: str) -> int:
    """Return a resource of the whole kernel: modules have figures of their own elsewhere in the file."""
    for tag in tags:
        if text := root.findtext(f"AreaEstimates/Resources/{tag}"):
            return int(text)
    raise ValueError(f"it has no AreaEstimates/Resources/{tags[0]}")


def _loops(root: Xml.Element) -> Iterator[tuple[str, int]]:
    top = root.findtext("UserAssignments/TopModelName", "")
    modules = root.iterfind("ModuleInformation/Module")
    for name, module in [(top, root), *((module.findtext("Name", ""), module) for module in modules)]:
        for loops in module.iterfind("PerformanceEstimates/SummaryOfLoopLatency"):
            yield from _nested_loops(name, loops)


def _nested_loops(module: str, loops: Xml.Element) -> Iterator[tuple[str, int]]:
    """Yield the pipelined loops of an element; a loop's element is named for it and holds those of its inner loops."""
    for loop in loops:
        # A loop that is not pipelined, or whose interval is unknown, has no number here.
        interval = loop.findtext("PipelineII", "")
        if interval.isdigit():
            yield f"{module}/{loop.findtext('Name', loop.tag)}", int(interval)
        yield from _nested_loops(module, loop)
