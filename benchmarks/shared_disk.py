"""Measures a training of GPT-2 whose optimizer state and activations share one slow disk.

    python benchmarks/shared_disk.py --size 124m --shape 4 1024 --storage /mnt/nvme0

First the step is measured with the disk as it is and with activations in memory. Then reads and writes of all files
take turns at the rate at which moving the state alone takes a share of that step (`--share`), once with activations in
memory and once with `activations={}`, which is to offload no more than costs no time. "bound" is the longer of the
first step and all bytes divided by the rate: no step can be shorter. "waits" are the seconds in which training stood
still for parameters or state, and for activations. Only a core that was built with SMART_INFINITY_TESTING can be slowed
down. On processors without instructions for bf16, use `--precision fp32`.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from comparison import Figures, compare, in_child, parse_options
from gpt2 import CONTEXT
from machine import describe
from training import Probe, tokens, train_with_package

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD

sys.path.append(str(Path(__file__).parents[1]))
from tests.helpers.native_testing import Throttle

PRECISIONS = {"bf16": "bf16-mixed", "fp32": "32-true"}
WARMUP = FIRST_SETTLED_FORWARD  # steps: one forward each
UNLIMITED, STATE, BOTH = "unlimited", "state", "state and activations"
COLUMNS = {
    "disk GB/s": ("rate_gb", 3),
    "state GB": ("state_gb", 2),
    "activations GB": ("activations_gb", 2),
    "step s": ("seconds", 2),
    "bound s": ("bound", 2),
    "step / bound": ("of_bound", 3),
    "waits s": ("waited", 2),
    "waits for activations s": ("activations_waited", 2),
}


class Watch:
    """Slows the disk down when training begins, and takes time and bytes at the end of each step.

    Args:
        rate: Bytes per second of the disk; 0: as fast as it is.
        steps: Number of steps.
    """

    def __init__(self, rate: float, steps: int) -> None:
        self._rate, self._steps = rate, steps
        self._ends: list[float] = []
        self._traffic: list[Any] = []

    def start(self, trainer: Any, _: Any) -> None:
        """Slow the disk down."""
        state = trainer.strategy.optimizers[0].rank_state
        throttle = Throttle(state.handler._device.pipeline, state.handler._store.files)
        throttle.bytes_per_second = self._rate
        if state.activations is not None:
            files = state.activations._store.files.tensors
            throttle.share(files.core, files._files.files)

    def end(self, trainer: Any, *_: Any) -> None:
        """Note the end of a step."""
        self._ends.append(time.perf_counter())
        if len(self._ends) in (WARMUP, self._steps):
            self._traffic.append(trainer.strategy.traffic())

    def figures(self) -> Figures:
        """Return the median of the steps, and the bytes of one."""
        (before, after), steps = self._traffic, self._steps - WARMUP

        def in_a_step(*names: str) -> float:
            return sum(getattr(after, name) - getattr(before, name) for name in names) / steps

        return {
            "rate_gb": self._rate / 1e9,
            "state_gb": in_a_step("shared_read_bytes", "shared_write_bytes") / 1e9,
            "activations_gb": in_a_step("activation_read_bytes", "activation_write_bytes") / 1e9,
            "seconds": median(end - begin for begin, end in pairwise(self._ends[WARMUP - 1 :])),
            "waited": in_a_step("wait_seconds"),
            "activations_waited": in_a_step("activation_wait_seconds"),
        }


def run(options: argparse.Namespace) -> Figures:
    """Train in this process."""
    from lightning.pytorch.callbacks import LambdaCallback

    watch = Watch(options.rate, options.steps)
    train_with_package(
        options.size,
        options.steps,
        options.storage,
        accelerator="cpu",
        probe=Probe(),
        precision=PRECISIONS[options.precision],
        batches=partial(tokens, size=options.size, shape=tuple(options.shape)),
        settings={"overlap": options.overlap, "activations": {} if options.child == BOTH else None},
        callbacks=[LambdaCallback(on_train_start=watch.start, on_train_batch_end=watch.end)],
    )
    return watch.figures()


def rows(options: argparse.Namespace) -> dict[str, Figures | None]:
    """Return the figures of each training; None for one that failed."""
    free = in_child(__file__, options, UNLIMITED)
    found: dict[str, Figures | None] = {UNLIMITED: free}
    if free is not None:
        rate = free["state_gb"] * 1e9 / (options.share * free["seconds"])
        for name in (STATE, BOTH):
            figures = in_child(__file__, options, name, rate=rate)
            if figures is not None:
                nbytes = 1e9 * (figures["state_gb"] + figures["activations_gb"])
                bound = max(free["seconds"], nbytes / rate)
                figures |= {"bound": bound, "of_bound": figures["seconds"] / bound}
            found[name] = figures
    return found


def main() -> int:
    """Measure, and print a table below the machine."""
    options = parse_options(
        __doc__,
        warm_up=WARMUP,
        tokens=None,
        steps={"type": int, "default": WARMUP + 5, "help": f"the first {WARMUP} are not measured"},
        shape={"nargs": 2, "type": int, "default": [4, CONTEXT], "metavar": ("BATCH", "LENGTH")},
        share={"type": float, "default": 0.8, "help": "of the step, that moving the state takes at the disk's rate"},
        precision={"choices": PRECISIONS, "default": "bf16"},
        overlap={"choices": ("none", "forward", "backward"), "default": "backward"},
        rate={"type": float, "default": 0.0, "help": argparse.SUPPRESS},
    )
    model, shape = f"GPT-2 {options.size}, {options.precision}", "{} x {}".format(*options.shape)
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=partial(describe, "torch"),
        heading=f"{model}, {shape} tokens, overlap {options.overlap}, one disk for state and activations",
        rows=partial(rows, options),
    )


if __name__ == "__main__":
    sys.exit(main())
