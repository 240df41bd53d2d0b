"""Compares update throughput with the raw disk, for every state format and every I/O engine.

    python benchmarks/update.py --folder /mnt/nvme0 --million 200 --json update.json

A step of the transfer handler reads, updates and writes the state of bf16 parameters. The raw disk moves the same
number of bytes without the handler: it reads where the state lies and writes where the next step will, in the same
file, as files on one disk differ. Its settings are the best of a sweep. It takes turns with the steps, as the speed of
a shared disk drifts. The plain engine uses the page cache; the raw disk avoids it wherever possible.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from comparison import table, write_figures
from machine import describe
from raw_disk import BLOCKS, DEPTHS, MIB, IoSettings, RawDisk, all_settings
from stepped_state import SteppedState

from lightning_smartinfinity.native import io_engines
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.settings import TransferConfig

COLUMNS = {  # key of a row's figures and number of digits
    "read B/param": ("read_per_parameter", 2),
    "written B/param": ("written_per_parameter", 2),
    "GB/s": ("gb_per_second", 2),
    "M params/s": ("million_per_second", 1),
    "raw GB/s": ("raw_gb_per_second", 2),
    "of the raw disk": ("ratio", 3),
    "CPU s per step": ("cpu_seconds", 2),
    "CPU s per GiB": ("cpu_seconds_per_gib", 3),
    "raw CPU s per GiB": ("raw_cpu_seconds_per_gib", 3),
}


def main() -> None:
    """Print the table below the machine."""
    options = parse_options()
    machine = describe()
    print(machine)
    rows = {}
    for state_format in options.formats:
        best: list[IoSettings] = []  # best settings for this format's mix
        for engine in options.engines:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix="update-") as folder:
                rows[f"{state_format}, {engine}"] = measure(Path(folder), state_format, engine, best, options)
    print(f"{options.million} M parameters, medians of {options.runs} steps\n")
    print(table(rows, COLUMNS, head="state format, engine"))
    write_figures(options.json, benchmark="update", machine=machine, million=options.million, rows=rows)


def parse_options() -> argparse.Namespace:
    """Parse the command line; ``sweep`` holds the settings that the raw disk's sweep tries."""
    engines = [name for name, reason in io_engines() if reason is None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--million", type=float, default=200, help="parameters, in millions")
    parser.add_argument("--formats", nargs="+", choices=STATE_FORMATS, default=list(STATE_FORMATS))
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines, help="default: all there are here")
    parser.add_argument("--runs", type=int, default=5, help="measured steps; one more comes before")
    parser.add_argument("--sweep-mib", type=int, default=384, help="moved for each setting of the sweep")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--tiny", action="store_true", help="shows no more than that it works")
    options = parser.parse_args()
    options.sweep = all_settings(BLOCKS, DEPTHS)
    if options.tiny:
        options.million, options.runs, options.sweep_mib = 0.1, 1, 1
        options.sweep = all_settings((MIB // 4,), (2,))
    return options


def measure(
    folder: Path, state_format: str, engine: str, best: list[IoSettings], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure steps in turn with the raw disk.

    Args:
        folder: Empty folder for the state and for the raw disk's file.
        state_format: A name in ``STATE_FORMATS``.
        engine: ``TransferConfig.io_engine``.
        best: The raw disk's best settings for this format's mix; the sweep fills it if it is empty.
        options: The command line.
    """
    state = SteppedState(
        [folder],
        [round(options.million * 1e6)],
        state_format=state_format,
        transfer=TransferConfig(io_engine=engine, tasklet_bytes=MIB // 4 if options.tiny else 4 * MIB),
    )
    first = state.step()
    moved = first["read"] + first["written"]
    state.step()  # now both halves have been written
    (path,) = folder.rglob("state.bin")
    # Even when rounded to blocks, neither half may overlap the other, which holds the state.
    room = round(moved) - 2 * max(setting.block for setting in options.sweep)
    raw = RawDisk(path, room, read_fraction=first["read"] / moved, settings=options.sweep)
    raw.read_at, raw.write_at = state.halves()
    if not best:
        best += raw.sweep(options.sweep_mib * MIB)
    steps, rates = [], {setting: [] for setting in best}
    for _ in range(options.runs):
        steps.append(state.step())
        raw.read_at, raw.write_at = state.halves()
        for setting in best:
            rates[setting].append(raw.measure(setting))
    state.close()
    seconds, cpu = (statistics.median(step[key] for step in steps) for key in ("seconds", "cpu"))
    speeds = {s: statistics.median(rate.gb_per_second for rate in of) for s, of in rates.items()}
    fastest = max(speeds, key=lambda setting: speeds[setting])
    return {
        "format": state_format,
        "engine": engine,
        "read_per_parameter": first["read"] / state.numel,
        "written_per_parameter": first["written"] / state.numel,
        "gb_per_second": moved / seconds / 1e9,
        "million_per_second": state.numel / seconds / 1e6,
        "raw_gb_per_second": speeds[fastest],
        "raw_setting": str(fastest),
        "raw_direct": raw.direct,
        "ratio": moved / seconds / 1e9 / speeds[fastest],
        "seconds": [step["seconds"] for step in steps],
        "raw_gb_per_second_of_runs": [rate.gb_per_second for rate in rates[fastest]],
        "cpu_seconds": cpu,
        "cpu_seconds_per_gib": cpu / moved * 2**30,
        "raw_cpu_seconds_per_gib": statistics.median(rate.cpu_seconds_per_gib for rate in rates[fastest]),
    }


if __name__ == "__main__":
    main()
