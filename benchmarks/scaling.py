"""Measures how the cost of a step grows with tensors, parameters, storage folders and processes: ideally linearly.

    python benchmarks/scaling.py --folders /mnt/nvme0 /mnt/nvme1 --million 100 --json scaling.json

Every row is a step of the transfer handler over optimizer state on storage, with bf16 parameters in memory and without
a model. The rows of a series differ in one number and take turns. Processes divide the parameters among them, as
ZeRO-3's ranks do, and step together; the slowest counts. Folders on one disk show what more folders cost; folders on
several disks show what they gain.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from comparison import table, write_figures
from machine import describe
from stepped_state import SteppedState

from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.settings import TransferConfig

COLUMNS = {  # key of a row's figures and number of digits
    "size": ("size", 0),
    "s per step": ("seconds", 4),
    "M params/s": ("million_per_second", 1),
    "CPU s per step": ("cpu_seconds", 4),
    "time, of the first row": ("growth", 2),
    "size, of the first row": ("size_growth", 2),
}
FIRST_SHARE = 8  # the series of parameters begins with one part in this many


@dataclass(frozen=True)
class Case:
    """The size of a step.

    Args:
        tensors: Number of tensors, all equally large except the last.
        numel: Number of parameters in all.
        folders: Storage folders of each process.
        processes: Number of processes that divide the parameters.
    """

    tensors: int
    numel: int
    folders: int = 1
    processes: int = 1

    def numels(self) -> list[int]:
        """Return the elements of each tensor of one process."""
        numel, tensors = self.numel // self.processes, max(1, self.tensors // self.processes)
        return [numel // tensors] * (tensors - 1) + [numel - numel // tensors * (tensors - 1)]


def all_series(
    numel: int, tensors: Sequence[int], folders: int, processes: Sequence[int]
) -> dict[str, dict[int, Case]]:
    """Return the cases by series and size."""
    few = min(tensors)
    parts = [numel * part // FIRST_SHARE for part in (1, 2, 4, 8)]
    return {
        "tensors": {size: Case(size, numel) for size in tensors},
        "parameters": {size: Case(few, size) for size in parts},
        "folders": {size: Case(few, numel, folders=size) for size in range(1, folders + 1)},
        "processes": {size: Case(few, numel, processes=size) for size in processes},
    }


class Running:
    """A case whose state lies on storage, with processes that wait for commands."""

    def __init__(self, case: Case, folders: Sequence[Path], options: argparse.Namespace, stack: ExitStack) -> None:
        self.steps: list[dict[str, float]] = []
        self._pipes: list[Connection] = []
        # No threads run in this process, so forking is safe; it saves importing torch again.
        fork = multiprocessing.get_context("fork")
        transfer = TransferConfig(tasklet_bytes=options.tasklet_kib << 10, io_engine=options.engine)
        for _ in range(case.processes):
            places = []
            for index in range(case.folders):
                disk = folders[index % len(folders)]
                places.append(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk, prefix="scaling-"))))
            pipe, other = fork.Pipe()
            process = fork.Process(
                target=_serve, args=(other, places, case.numels(), options.format, transfer), daemon=True
            )
            process.start()
            other.close()
            stack.callback(process.join)
            stack.callback(pipe.send, False)
            self._pipes.append(pipe)
        for pipe in self._pipes:
            pipe.recv()

    def step(self) -> None:
        """Let all processes step at once."""
        for pipe in self._pipes:
            pipe.send(True)
        done = [pipe.recv() for pipe in self._pipes]
        self.steps.append({"seconds": max(d["seconds"] for d in done), "cpu": sum(d["cpu"] for d in done)})


def _serve(
    pipe: Connection, folders: list[Path], numels: list[int], state_format: str, transfer: TransferConfig
) -> None:
    """Step at each command until told to stop."""
    state = SteppedState(folders, numels, state_format=state_format, transfer=transfer)
    try:
        state.step()
        pipe.send(True)
        while pipe.recv():
            pipe.send(state.step())
    finally:
        state.close()


def measure(cases: dict[int, Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one series."""
    with ExitStack() as stack:
        running = {size: Running(case, options.folders, options, stack) for size, case in cases.items()}
        for _ in range(options.runs):
            for case in running.values():
                case.step()
    rows: list[dict[str, Any]] = []
    for size, case in cases.items():
        seconds, cpu = (statistics.median(s[key] for s in running[size].steps) for key in ("seconds", "cpu"))
        rows.append(
            {
                "size": size,
                "seconds": seconds,
                "cpu_seconds": cpu,
                "million_per_second": case.numel / seconds / 1e6,
                "growth": seconds / rows[0]["seconds"] if rows else 1.0,
                "size_growth": size / min(cases),
                "seconds_of_runs": [step["seconds"] for step in running[size].steps],
            }
        )
    return rows


def main() -> None:
    """Print a table for each series."""
    options = parse_options()
    machine = describe()
    print(machine)
    print(f"{options.million} M parameters, {options.format}, {options.engine} engine, medians of {options.runs} steps")
    numel = round(options.million * 1e6)
    series = all_series(numel, options.tensors, max(2, len(options.folders)), options.processes)
    found = {}
    for name in options.series:
        found[name] = measure(series[name], options)
        print("\n" + table({f"{name} {row['size']}": row for row in found[name]}, COLUMNS, head=name))
    write_figures(options.json, benchmark="scaling", machine=machine, million=options.million, series=found)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    names = list(all_series(0, (1,), 1, (1,)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", type=Path, default=[Path()], help="on the disks to measure")
    parser.add_argument("--million", type=float, default=100, help="parameters of the largest rows, in millions")
    parser.add_argument("--series", nargs="+", choices=names, default=names)
    parser.add_argument("--tensors", nargs="+", type=int, default=[10, 1000, 10000])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--format", choices=STATE_FORMATS, default="fp32")
    parser.add_argument("--engine", default="auto", help="as TransferConfig(io_engine=...)")
    parser.add_argument("--runs", type=int, default=5, help="measured steps; one more comes before")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--tiny", action="store_true", help="shows no more than that it works")
    options = parser.parse_args()
    options.tasklet_kib = 4096
    if options.tiny:
        options.million, options.runs, options.tasklet_kib = 0.1, 1, 64
        options.tensors, options.series = [2, 20], ["tensors", "folders", "processes"]
    return options


if __name__ == "__main__":
    main()
