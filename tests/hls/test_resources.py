"""Tests the tables of the FPGA's resources that the kernels should take."""

from __future__ import annotations

import re
from functools import reduce
from operator import xor
from pathlib import Path

import numpy as np

from hls import resources
from hls.description import KERNELS
from hls.resources import beat_columns, report
from hls.sources import write_sources
from lightning_smartinfinity import native

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


def test_streams_processes_and_operators_are_those_of_the_sources(tmp_path: Path) -> None:
    """The tables count the streams, in the memory that they are bound to, and a rule's multipliers: its asterisks."""
    rows = dict(re.findall(r"\| `(\w+)` \| (\d+) \|", report()))
    write_sources(tmp_path)
    for kernel in KERNELS:
        source = (tmp_path / f"{kernel.name}.cpp").read_text()
        beats = re.findall(r"hls::stream<(?:Words|Floats), [^>]+> (\w+)", source)
        runs = re.findall(r"hls::stream<Run, 2> (\w+)", source)
        assert len(beats) == len(runs) == 5 + 2 * len(kernel.arrays)
        assert source.count("    PROCESS(") == len(runs) + 1
        bound = dict(re.findall(r"BIND_STORAGE variable = (\w+) type = fifo impl = (\w+)", source))
        assert bound == dict.fromkeys([*beats, *runs, "entries", "findings"], "srl") | {"counts": "bram"}
        assert re.findall(r"variable = counts depth = (\d+)", source) == ["8192"]
        formula = (ROOT / "hls/kernels" / f"{kernel.name}.hpp").read_text()
        assert formula.count(" * ") == int(rows[kernel.name])


def test_bursts_and_runs_are_those_of_the_sources(tmp_path: Path) -> None:
    """The tables count block RAM for the bursts of the pragmas, and shift registers for the members of a run."""
    write_sources(tmp_path)
    for kernel in KERNELS:
        source = (tmp_path / f"{kernel.name}.cpp").read_text()
        bursts = re.findall(r"max_(?:read|write)_burst_length=(\d+) num_(?:read|write)_outstanding=(\d+)", source)
        pointers = sum(argument.is_pointer for argument in kernel.arguments)
        assert sorted(bursts) == [("2", "1"), *[(str(resources._BURST_BEATS), str(resources._BURSTS))] * (pointers - 1)]
    header = (ROOT / "hls/include/run.hpp").read_text()
    members = header.partition("struct Run {")[2].partition("};")[0]
    words = re.findall(r"^    std::uint32_t \w+;", members, re.MULTILINE)
    flags = re.findall(r"^    bool \w+;", members, re.MULTILINE)
    assert members.count(";") == len(words) + len(flags) + 1 and "std::uint32_t status[kLanes];" in members
    assert 32 * len(words) + len(flags) + resources._BEAT_BITS == resources._RUN_BITS
