"""Measures what the Trainer's record, from which an interrupted fit resumes, adds to a step of GPT-2 in bf16.

A record is written at the end of each batch. The table shows seconds of a step, from the end of one record to that of
the next, milliseconds of the records (median, 95th percentile, largest), their share of the steps, and their bytes.
Each training is a process of its own. Usage::

    python benchmarks/training_record.py [--size 124m] [--tokens 32] [--steps 42] [--storage .] [--json figures.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from comparison import Figures, compare, parse_options, several
from machine import describe
from training import WARMUP, Probe, tokens, train_with_package

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
    from lightning_smartinfinity.integrations.trainer.fit_record import TrainerFitRecord

    settings = dict(SYSTEMS[options.child])
    if "compression" in settings:
        settings["compression"] = TopK(settings["compression"])
    record = TrainerFitRecord._record_loop
    seconds: list[float] = []
    ends: list[float] = []
    sizes: list[int] = []

    def timed(recording: TrainerFitRecord, trainer: Any, *, after_batch: bool) -> None:
        begin = time.perf_counter()
        record(recording, trainer, after_batch=after_batch)
        ends.append(time.perf_counter())
        seconds.append(ends[-1] - begin)
        sizes.append(max(path.stat().st_size for path in Path(options.storage).rglob("training-*.bin")))

    TrainerFitRecord._record_loop = timed  # type: ignore[method-assign]
    train_with_package(
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


def main() -> int:
    """Print the table below the machine.

    Returns:
        Exit status: 1 if a system failed.
    """
    options = parse_options(__doc__, systems=several(list(SYSTEMS), metavar="SYSTEM"), steps={"default": WARMUP + 40})
    measured = f"{options.steps - WARMUP} steps"
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=partial(describe, "torch", "lightning", "deepspeed"),
        heading=f"GPT-2 {options.size}, bf16, 1 x {options.tokens} tokens, {measured}",
    )


if __name__ == "__main__":
    sys.exit(main())
