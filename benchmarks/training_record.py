"""Measures what the Trainer's record, from which an interrupted fit resumes, adds to a step of GPT-2 in bf16.

A record is written at the end of each batch. The table shows seconds of a step, from the end of one record to that of
the next, milliseconds of the records (median, 95th percentile, largest), their share of the steps, and their bytes.
Each training is a process of its own. Usage::

    python benchmarks/training_record.py [--size 124m] [--tokens 32] [--steps 42] [--storage .] [--json figures.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from comparison import Figures, measure, report, table
from gpt2 import CONTEXT, SIZES
from machine import describe
from training import WARMUP, Probe, tokens, train_near_storage

SYSTEMS: dict[str, dict[str, Any]] = {
    "overlap none": {"overlap": "none"},
    "overlap forward": {"overlap": "forward"},
    "overlap backward": {"overlap": "backward"},
    "int8, overlap forward": {"overlap": "forward", "state_format": "int8"},
    "TopK 1 %, overlap forward": {"overlap": "forward", "compression": 0.01},
}
COLUMNS = {
    "step s": ("step", 3),
    "record ms": ("median", 2),
    "95 %, ms": ("most", 2),
    "largest ms": ("largest", 2),
    "share of the step, %": ("share", 2),
    "bytes": ("bytes", 0),
}


def run(options: argparse.Namespace) -> Figures:
    """Train in this process, and time each record."""
    from lightning_smartinfinity import TopK
    from lightning_smartinfinity.recording import FitRecording

    settings = dict(SYSTEMS[options.child])
    if "compression" in settings:
        settings["compression"] = TopK(settings["compression"])
    record = FitRecording._record_loop
    seconds: list[float] = []
    ends: list[float] = []
    sizes: list[int] = []

    def timed(recording: FitRecording, trainer: Any, *, after_batch: bool) -> None:
        begin = time.perf_counter()
        record(recording, trainer, after_batch=after_batch)
        ends.append(time.perf_counter())
        seconds.append(ends[-1] - begin)
        sizes.append(max(path.stat().st_size for path in Path(options.storage).rglob("training-*.bin")))

    FitRecording._record_loop = timed  # type: ignore[method-assign]
    train_near_storage(
        options.size,
        options.steps,
        options.storage,
        accelerator="cpu",
        probe=Probe(),
        batches=partial(tokens, size=options.size, shape=(1, options.tokens)),
        settings=settings,
    )
    steps = [b - a for a, b in pairwise(ends)][WARMUP:]
    records = seconds[1 + WARMUP :]  # the first one is that of the fit's beginning
    return {
        "step": statistics.median(steps),
        "median": 1e3 * statistics.median(records),
        "most": 1e3 * sorted(records)[-(-95 * len(records) // 100) - 1],
        "largest": 1e3 * max(records),
        "share": 100 * sum(records) / sum(steps),
        "bytes": sizes[-1],
    }


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--tokens", type=int, default=32, help=f"of a step, at most {CONTEXT}")
    parser.add_argument("--steps", type=int, default=WARMUP + 40, help=f"the first {WARMUP} do not count")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--storage", default=".", help="folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARMUP:
        parser.error(f"--steps {options.steps} leaves none to measure: the first {WARMUP} warm up")
    return options


def main() -> int:
    """Print the table."""
    options = parse_options()
    if options.child:
        report(run(options))
        return 0
    machine = describe("torch", "lightning", "deepspeed")
    print(machine)
    rows: dict[str, Figures] = {}
    for system in options.systems:
        with tempfile.TemporaryDirectory(dir=options.storage, prefix="records-") as folder:
            shape = ["--size", options.size, "--steps", str(options.steps), "--tokens", str(options.tokens)]
            figures = measure(system, __file__, "--child", system, *shape, "--storage", folder)
        if figures is None:
            return 1
        rows[system] = figures
    print(f"\nGPT-2 {options.size}, bf16, 1 x {options.tokens} tokens, {options.steps - WARMUP} steps\n")
    print(table(rows, COLUMNS))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "size": options.size, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
