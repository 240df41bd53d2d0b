"""Measures GPT-2's training step with all, some and none of the optimizer state in host memory.

    python benchmarks/tiers.py --size 124m 355m --tokens 32 512 --storage /mnt/nvme0 --json tiers.json

The systems: torch's fused AdamW in memory (adamw), stock ZeRO-Offload with DeepSpeedCPUAdam, built when it first runs
(zero_offload), and this package: at its defaults, with a part of the state in memory, and with durability="step". The
systems take turns, each in a process of its own. A step lasts from the end of the previous step to its own end; figures
are medians over the steps of all rounds. State in memory is written every --persist-every steps; measure a multiple of
as many, so that each interval's write counts. "of the line" divides a step by that on the straight line between all and
none of the state in memory. overlap="auto" tries both overlaps in the first eight steps. Pass --precision fp32 where
the processor has no instructions for bf16: there torch's products of bf16 matrices take nearly all of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from itertools import product

import torch
from comparison import Figures, in_child, parse_options, report, several, table, write_figures
from gpt2 import GPT2, SIZES
from machine import describe
from step import CLIP, StepProbe, in_fp32, run, shape_of
from training import PARTS, WARMUP, tokens, train_with_package

PERSIST_EVERY = 20
STATE_BYTES = 12  # per parameter: fp32 masters and two moments
OTHERS = ("adamw", "zero_offload")
SHARES = {"default": 1.0, "three quarters": 0.75, "half": 0.5, "nothing": 0.0}  # of the state in memory
COLUMNS = {  # key of a system's figures and number of digits
    **{f"{part} s": (part, 3) for part in PARTS},
    "step s": ("total", 3),
    "x adamw": ("of_adamw", 2),
    "x zero_offload": ("of_zero_offload", 2),
    "of the line": ("of_line", 2),
    "written MB/step": ("written_mb", 1),
    "peak RSS GB": ("peak_gb", 2),
}


def run_child(options: argparse.Namespace) -> Figures:
    """Run one system in this process."""
    (options.size,), system = options.size, options.child
    if system in OTHERS:
        return run(options)
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT2(options.size).parameters())
    transfer: dict[str, int | str] = {"persist_every": options.persist_every}
    if system == "step":
        transfer["durability"] = "step"
    elif system != "default":
        transfer["dram_cache_bytes"] = int(SHARES[system] * STATE_BYTES * numel)
    probe = StepProbe(options.steps)
    train_with_package(
        options.size,
        options.steps,
        options.storage,
        accelerator="cpu",
        probe=probe,
        batches=partial(tokens, size=options.size, shape=shape_of(int(options.tokens[0]))),
        clip=CLIP if options.clip == ["on"] else None,
        precision="32-true" if in_fp32(options) else "bf16-mixed",
        settings={"transfer": transfer},
    )
    return probe.figures(numel)


def measure_all(options: argparse.Namespace, **case: str | int) -> dict[str, Figures]:
    """Let all systems take turns in all rounds; return the rows of those that never failed, with their ratios."""
    turns = [
        {system: in_child(__file__, options, system, **case) for system in options.systems}
        for _ in range(options.rounds)
    ]
    rows = {}
    for system in options.systems:
        found = [figures for turn in turns if (figures := turn[system]) is not None]
        if len(found) == options.rounds:
            rows[system] = {
                key: statistics.median(seconds for figures in found for seconds in figures[key])
                for key in (*PARTS, "total")
            }
            written = statistics.mean(figures["written_per_parameter"] * figures["parameters"] for figures in found)
            rows[system] |= {"written_mb": written / 1e6, "peak_gb": max(figures["peak_gb"] for figures in found)}
    for system, row in rows.items():
        row |= {f"of_{other}": row["total"] / rows[other]["total"] for other in OTHERS if other in rows}
        if system in SHARES and {"default", "nothing"} <= rows.keys():
            share = SHARES[system]
            row["of_line"] = row["total"] / (share * rows["default"]["total"] + (1 - share) * rows["nothing"]["total"])
    return rows


def main() -> int:
    """Measure all systems, and print a table for each size and number of tokens, without clipping and with it.

    Returns:
        Exit status: 1 if a system failed.
    """
    options = parse_options(
        __doc__,
        size=several(tuple(SIZES), ["124m", "355m"]),
        systems=several((*OTHERS, *SHARES, "step"), metavar="SYSTEM"),
        clip={"nargs": "+", "choices": ("off", "on"), "default": ["off", "on"], "help": f"gradients, to {CLIP}"},
        tokens={"nargs": "+", "type": int, "default": [32, 512]},
        steps={"default": WARMUP + PERSIST_EVERY},
        rounds={"type": int, "default": 1},
        persist_every={"type": int, "default": PERSIST_EVERY, "help": "steps between two writes of state in memory"},
        precision={"choices": ("bf16", "fp32"), "default": "bf16"},
        stock_adam={"choices": ("deepspeed", "torch"), "default": "deepspeed"},
    )
    if options.child:
        report(run_child(options))
        return 0
    machine = describe("torch", "lightning", "deepspeed")
    print(machine)
    tables = []
    for size, number, clip in product(options.size, options.tokens, options.clip):
        rows = measure_all(options, size=size, tokens=number, clip=clip)
        shape = f"{options.precision}, {number} tokens, clipping {clip}"
        print(f"\nGPT-2 {size}, {shape}, {options.steps - WARMUP} steps, as medians\n")
        print(table(rows, COLUMNS), flush=True)
        tables.append({"size": size, "tokens": number, "clip": clip == "on", "rows": rows})
    write_figures(options.json, benchmark="tiers", precision=options.precision, machine=machine, tables=tables)
    return int(any(len(of["rows"]) < len(options.systems) for of in tables))


if __name__ == "__main__":
    sys.exit(main())
