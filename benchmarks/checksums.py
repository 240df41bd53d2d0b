"""Measures what checksums add to a training step of GPT-2 in bf16: every system with and without them.

Without them, the core takes the checksum of anything to be 0, in what it writes and in what it compares. Each training
is a process of its own. In every round all of them take turns, in another order each time, since the speed of a shared
disk drifts; the table shows medians over all steps, and the median of the ratios within a round. Usage::

    python benchmarks/checksums.py [--size 124m] [--tokens 32] [--rounds 5] [--storage .] [--json figures.json]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from comparison import Figures, compare, in_child, parse_options
from machine import describe
from raw_disk import cpu_seconds
from training import WARMUP, Probe, tokens, train_with_package

sys.path.append(str(Path(__file__).parents[1]))
from tests.helpers.native_testing import leave_out_crc32c

SYSTEMS: dict[str, dict[str, Any]] = {
    "state on storage": {},
    "state and parameters on storage": {"offload_param": {"device": "nvme"}},
}
WAYS = ("with", "without")
COLUMNS = {
    "step s": ("with", 3),
    "without checksums, s": ("without", 3),
    "checksums add, %": ("share", 1),
    "CPU s of a step": ("cpu_with", 2),
    "without checksums, CPU s": ("cpu_without", 2),
}


class CpuProbe(Probe):
    """Records CPU time from the end of a step to the end of the next, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: list[float] = []

    def end(self) -> None:
        """End the step."""
        super().end()
        self.cpu.append(cpu_seconds())


def run(options: argparse.Namespace) -> Figures:
    """Train in this process."""
    system, _, way = options.child.removesuffix(" checksums").rpartition(", ")
    leave_out_crc32c(way == "without")
    probe = CpuProbe()
    train_with_package(
        options.size,
        options.steps,
        options.storage,
        accelerator="cpu",
        probe=probe,
        batches=partial(tokens, size=options.size, shape=(1, options.tokens)),
        settings={"overlap": "none"},
        **SYSTEMS[system],
    )
    cpu = (probe.cpu[-1] - probe.cpu[WARMUP - 1]) / (options.steps - WARMUP)
    return {"seconds": probe.medians()["total"], "cpu": cpu}


def rounds(options: argparse.Namespace) -> dict[str, Figures]:
    """Let all trainings take turns, and return the figures of each system."""
    ways = [f"{system}, {way} checksums" for system, way in product(SYSTEMS, WAYS)]
    found: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in random.sample(ways, len(ways)):
            figures = in_child(__file__, options, way)
            if figures is None:
                raise SystemExit(1)
            found[way].append(figures)
    return {system: summary(*(found[f"{system}, {way} checksums"] for way in WAYS)) for system in SYSTEMS}


def summary(with_them: list[Figures], without: list[Figures]) -> Figures:
    """Return a system's row, and the seconds of every round."""
    seconds = [[figures["seconds"] for figures in of] for of in (with_them, without)]
    return {
        "with": statistics.median(seconds[0]),
        "without": statistics.median(seconds[1]),
        "share": 100 * (statistics.median(a / b for a, b in zip(*seconds, strict=True)) - 1),
        "cpu_with": statistics.median(figures["cpu"] for figures in with_them),
        "cpu_without": statistics.median(figures["cpu"] for figures in without),
        "seconds_of_rounds": seconds,
    }


def main() -> int:
    """Print the table below the machine.

    Returns:
        Exit status: 1 if a training failed.
    """
    options = parse_options(__doc__, rounds={"type": int, "default": 5})
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=partial(describe, "torch", "lightning", "deepspeed"),
        heading=f"GPT-2 {options.size}, bf16, 1 x {options.tokens} tokens, {options.rounds} rounds",
        rows=partial(rounds, options),
    )


if __name__ == "__main__":
    sys.exit(main())
