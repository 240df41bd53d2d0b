"""Measures GPT-2's training step in bf16, beside DeepSpeed's ZeRO-Infinity and ZeRO-Offload and torch's AdamW.

    python benchmarks/step.py --size 124m --storage /mnt/nvme0 --json step.json
    python benchmarks/step.py --size 355m --storage /mnt/nvme0 --tokens 32 match --rounds 2

A system of this package is named by its state format and its overlap. ZeRO-Infinity is measured with the I/O settings
of Lightning's preset (zero_infinity: 4 buffers, blocks of 1 MiB, a queue depth of 8) and pipelined with 12 buffers,
blocks of 8 MiB and a queue depth of 32 (zero_infinity_tuned). Other settings differ from Lightning's: DeepSpeed runs
without Lightning, with sub-groups and reduce buckets of 20 M elements, and with overlap_comm off. Its async_io op is
built when it first runs, which needs libaio's header and takes minutes; TORCH_EXTENSIONS_DIR keeps it. With --stock-io
glue the op's C++ files are compiled behind a layer of this project, in seconds. That shows that the benchmark works,
but it is less than half as fast, so its figures do not represent DeepSpeed. torch's fused AdamW updates for DeepSpeed;
with --stock-adam deepspeed its own Adam does, which is also built.

Each system trains in a process of its own. The systems take turns in as many rounds as wanted, and the raw disk is
measured before each turn. A step lasts from the end of the previous step to its own end; what overlaps the next step
counts in that step's parts. "bound" is the longer of CPU time divided by cores, and bytes divided by the raw disk's
bandwidth at equal reads and writes, in a separate file. Files on one disk differ by some per cent, so a step may even
be faster. "--tokens match" finds the number of tokens at which forward and backward take as long as the update of
zero_infinity_tuned.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from comparison import Figures, in_child, parse_options, report, several, table, write_figures
from gpt2 import CONTEXT, GPT2
from machine import describe
from peak_memory import resident, restart_peak, system_io, train_in_memory, zero_infinity_config
from raw_disk import MIB, IoSettings, RawDisk, all_settings, cpu_seconds
from training import PARTS, WARMUP, Probe, tokens, train_stock, train_with_package

from lightning_smartinfinity.common.machine import available_cores
from lightning_smartinfinity.native.formats import STATE_FORMATS

OVERLAPS = ("none", "forward", "backward")
OURS = tuple(f"{form}/{overlap}" for form, overlap in product(STATE_FORMATS, OVERLAPS))
BASELINE = "zero_infinity_tuned"
STOCK = (BASELINE, "zero_infinity", "zero_offload")
SYSTEMS = (*STOCK, "adamw", *OURS)
CLIP = 1.0
FEW_TOKENS, MORE_TOKENS = 32, 256  # numbers from which --tokens match extrapolates
COLUMNS = {  # key of a system's figures and number of digits
    **{f"{part} s": (part, 3) for part in PARTS},
    "step s": ("total", 3),
    "x tuned": ("speedup", 2),
    "read B/param": ("read_per_parameter", 1),
    "written B/param": ("written_per_parameter", 1),
    "CPU s": ("cpu", 2),
    "bound s": ("bound", 3),
    "of the bound": ("of_bound", 2),
    "peak RSS GB": ("peak_gb", 2),
    "peak RSS GB, set-up": ("setup_peak_gb", 2),
}


class StepProbe(Probe):
    """Records the parts of each step, its time from end to end, CPU time, bytes and memory.

    Args:
        steps: Number of steps after which the figures are taken, so that tearing a system down does not count.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._num_steps = steps
        self._ends: list[tuple[float, float]] = []  # clock and CPU time
        self._io: list[dict[str, int]] = []  # at the beginning and the end of the measured steps
        self._peaks: list[int] = []  # at the same moments

    def end(self) -> None:
        """End a step. After the warm-up, restart the peak of memory at the present size."""
        super().end()
        self._ends.append((time.perf_counter(), cpu_seconds()))
        if len(self._ends) in (WARMUP, self._num_steps):
            self._peaks.append(resident("VmHWM"))
            self._io.append(system_io())
        if len(self._ends) == WARMUP:
            restart_peak()

    def figures(self, numel: int) -> Figures:
        """Return the seconds of each measured step, and the other figures over all of them.

        Args:
            numel: Parameters of the model.
        """
        ends, (before, after) = self._ends[WARMUP - 1 :], self._io
        gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)]
        moved = {key: (after[key] - before[key]) / numel / len(gaps) for key in ("read_bytes", "write_bytes")}
        return {
            **{part: [step[part] for step in self.steps[WARMUP:]] for part in PARTS},
            "total": [seconds for seconds, _ in gaps],
            "cpu": [cpu for _, cpu in gaps],
            "read_per_parameter": moved["read_bytes"],
            "written_per_parameter": moved["write_bytes"],
            "setup_peak_gb": self._peaks[0] / 1e9,
            "peak_gb": self._peaks[1] / 1e9,
            "parameters": numel,
        }


def shape_of(number: int) -> tuple[int, int]:
    """Return sequences and their length: one sequence up to the model's context, then more."""
    return (1, number) if number <= CONTEXT else (-(-number // CONTEXT), CONTEXT)


def run(options: argparse.Namespace) -> Figures:
    """Run one system in this process."""
    size, steps, folder = options.size, options.steps, options.storage
    clip = CLIP if options.clip == ["on"] else None
    probe = StepProbe(steps)
    common: dict[str, Any] = {
        "probe": probe,
        "batches": partial(tokens, size=size, shape=shape_of(int(options.tokens[0]))),
    }
    if options.child == "adamw":
        train_in_memory(size, steps, clip=clip, dtype=torch.float32 if in_fp32(options) else torch.bfloat16, **common)
    elif options.child in OURS:
        state_format, overlap = options.child.split("/")
        settings = {"state_format": state_format, "overlap": overlap}
        train_with_package(size, steps, folder, accelerator="cpu", clip=clip, settings=settings, **common)
    else:
        run_stock(options, clip, common)
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT2(size).parameters())
    return probe.figures(numel)


def in_fp32(options: argparse.Namespace) -> bool:
    """Return whether the model is trained in fp32."""
    return getattr(options, "precision", "bf16") == "fp32"


def run_stock(options: argparse.Namespace, clip: float | None, common: dict[str, Any]) -> None:
    """Run ZeRO-Offload or ZeRO-Infinity."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    config = zero_infinity_config(options.storage, pipelined=options.child == BASELINE)
    if options.child == "zero_offload":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    elif options.stock_io == "glue":
        import stock_io

        stock_io.install()
    config |= {"gradient_clipping": clip or 0.0, "bf16": {"enabled": not in_fp32(options)}}
    make_optimizer = None
    if options.stock_adam == "torch":
        config["zero_force_ds_cpu_optimizer"] = False
        make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    train_stock(options.size, options.steps, config, make_optimizer=make_optimizer, **common)


class Disk:
    """The raw disk with equal reads and writes, at its best settings."""

    def __init__(self, raw: RawDisk) -> None:
        self._raw = raw
        self._best: list[IoSettings] = raw.sweep(raw.nbytes // 4)

    @classmethod
    @contextmanager
    def measured(cls, folder: Path, *, settings: list[IoSettings], nbytes: int = 2048 * MIB) -> Iterator[Disk]:
        """Yield a disk with a file that is removed at the end.

        Args:
            folder: Folder on the disk.
            settings: Settings to try, of which the best are kept.
            nbytes: Bytes that one measurement moves.
        """
        with RawDisk.with_file(folder, nbytes, read_fraction=0.5, settings=settings) as raw:
            yield cls(raw)

    def gb_per_second(self) -> float:
        """Measure the present bandwidth."""
        return max(self._raw.measure(setting).gb_per_second for setting in self._best)


def child_figures(system: str, clip: str, number: int, options: argparse.Namespace) -> Figures | None:
    """Train a system in a process of its own and return its figures; None if it fails."""
    return in_child(__file__, options, system, clip=clip, tokens=number)


def rounds(clip: str, number: int, disk: Disk, options: argparse.Namespace) -> dict[str, Figures]:
    """Let all systems take turns, and return their figures with the steps of all rounds combined."""
    found: dict[str, list[Figures]] = {system: [] for system in options.systems}
    for _ in range(options.rounds):
        for system, of_system in found.items():
            bandwidth = disk.gb_per_second()
            figures = child_figures(system, clip, number, options)
            if figures is not None:
                of_system.append({**figures, "raw_gb_per_second": [bandwidth]})
    return {system: summary(of_system) for system, of_system in found.items() if len(of_system) == options.rounds}


def summary(of_rounds: list[Figures]) -> Figures:
    """Return medians of the steps' figures, the highest peaks, means of the rest, and the seconds of each step."""
    merged: Figures = {}
    for key in of_rounds[0]:
        values = [figures[key] for figures in of_rounds]
        if isinstance(values[0], list):
            merged[key] = statistics.median(value for of_round in values for value in of_round)
        else:
            merged[key] = max(values) if "peak" in key else statistics.mean(values)
    merged["seconds_of_steps"] = [seconds for figures in of_rounds for seconds in figures["total"]]
    moved = (merged["read_per_parameter"] + merged["written_per_parameter"]) * merged["parameters"]
    cores = available_cores()
    merged["bound"] = max(merged["cpu"] / cores, moved / merged["raw_gb_per_second"] / 1e9)
    merged["of_bound"] = merged["total"] / merged["bound"]
    return merged


def compare_with_baseline(rows: dict[str, Figures]) -> None:
    """Add the speedup over tuned ZeRO-Infinity, if that was measured."""
    if BASELINE in rows:
        for row in rows.values():
            row["speedup"] = rows[BASELINE]["total"] / row["total"]


def matching_tokens(options: argparse.Namespace) -> int:
    """Return the number of tokens at which forward and backward take as long as tuned ZeRO-Infinity's update."""
    few, more = (child_figures(BASELINE, "off", number, options) for number in (FEW_TOKENS, MORE_TOKENS))
    if few is None or more is None:
        raise SystemExit(f"--tokens match needs {BASELINE}, which failed.")
    passes = [statistics.median(map(sum, zip(f["forward"], f["backward"], strict=True))) for f in (few, more)]
    per_token = max((passes[1] - passes[0]) / (MORE_TOKENS - FEW_TOKENS), 1e-9)
    tokens_more = (statistics.median(few["update"]) - passes[0]) / per_token
    return max(FEW_TOKENS, FEW_TOKENS + round(tokens_more / FEW_TOKENS) * FEW_TOKENS)


def token_number(text: str) -> str:
    """Check a number of tokens, or "match"."""
    if text != "match" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: pass numbers, or match")
    return text


def main() -> int:
    """Measure each system and print a table for each number of tokens, with and without clipping.

    Returns:
        Exit status: 1 if a system failed.
    """
    options = parse_options(
        __doc__,
        systems=several(SYSTEMS, metavar="SYSTEM"),
        clip={"nargs": "+", "choices": ("off", "on"), "default": ["off", "on"], "help": f"gradients, to {CLIP}"},
        tokens={
            "nargs": "+",
            "type": token_number,
            "default": [str(FEW_TOKENS)],
            "help": 'of a step: numbers, or "match"',
        },
        rounds={"type": int, "default": 1},
        stock_adam={"choices": ("deepspeed", "torch"), "default": "torch"},
        stock_io={"choices": ("deepspeed", "glue"), "default": "deepspeed"},
    )
    if options.child:
        report(run(options))
        return 0
    machine = describe("torch", "lightning", "deepspeed")
    print(machine)
    numbers = [matching_tokens(options) if number == "match" else int(number) for number in options.tokens]
    tables, tiny = [], options.size == "tiny"
    raw: dict[str, Any] = {"settings": all_settings((MIB // 4,), (2,)) if tiny else all_settings()}
    with (
        tempfile.TemporaryDirectory(dir=options.storage, prefix="step-") as folder,
        Disk.measured(Path(folder), **raw, nbytes=(1 if tiny else 2048) * MIB) as disk,
    ):
        for number, clip in product(numbers, options.clip):
            rows = rounds(clip, number, disk, options)
            compare_with_baseline(rows)
            batch, length = shape_of(number)
            print(
                f"\nGPT-2 {options.size}, bf16, {batch} x {length} tokens, clipping {clip}, "
                f"{options.rounds * (options.steps - WARMUP)} steps\n"
            )
            print(table(rows, COLUMNS))
            tables.append({"tokens": batch * length, "clip": clip == "on", "rows": rows})
    write_figures(options.json, benchmark="step", machine=machine, size=options.size, tables=tables)
    return int(any(len(of["rows"]) < len(options.systems) for of in tables))


if __name__ == "__main__":
    sys.exit(main())
