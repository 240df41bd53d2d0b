"""Measures the sequential C simulation of the SmartSSD's kernels, and compares its bits with numpy over many steps.

Every kernel with every kind of gradient (dense, top 1 % and 8 bits) runs for some steps over one tasklet, whose values
include subnormals, infinities and NaNs at the start. With ``--verify`` each bit of each step is compared with numpy,
which takes far longer than the simulation. Usage::

    python benchmarks/csim.py [--rules adamw sgd_nesterov] [--numel 1048576] [--steps 5] [--verify]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.native import DType
from tests.helpers.golden import STEPS
from tests.hls.simulation import Library, built
from tests.hls.tasklet import Form, Tasklet, make_tasklet

FORMS = (
    *((kind, Form(dtype, dtype, ratio)) for dtype in DType for kind, ratio in (("dense", None), ("top 1 %", 0.01))),
    *(("8 bits", Form(DType.FLOAT32, dtype, block_scaled=True)) for dtype in DType),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rules", nargs="+", choices=STEPS, default=[rule.name for rule in RULES], help="by their golden steps"
    )
    parser.add_argument("--numel", type=int, default=1 << 20, help="elements of the tasklet")
    parser.add_argument("--steps", type=int, default=5, help="runs over it")
    parser.add_argument("--verify", action="store_true", help="compare every bit with numpy")
    options = parser.parse_args()
    print(describe("numpy"))
    simulation = Library(built("sequential"))
    print(f"{'step':14}{'gradient':10}{'':8}{'parameter':11}{'M elements/s':>12}")
    for name in options.rules:
        for kind, form in FORMS:
            tasklet = make_tasklet(STEPS[name], options.numel, form, seed=1, special=True)
            rate = pace(simulation, tasklet, steps=options.steps, verify=options.verify)
            gradient, parameter = (dtype.name.lower() for dtype in (form.gradient, form.parameter))
            print(f"{name:14}{gradient:10}{kind:8}{parameter:11}{rate / 1e6:12.1f}", flush=True)


def pace(simulation: Library, tasklet: Tasklet, *, steps: int, verify: bool) -> float:
    """Return the elements per second of the fastest step."""
    timed = Stopwatch(simulation)
    for _ in range(steps):
        if verify:
            tasklet.run(timed)
        else:
            tasklet.run_words(timed, tasklet.words(0, tasklet.numel))
    return tasklet.numel / timed.fastest


class Stopwatch:
    """A simulation that records its fastest run."""

    def __init__(self, simulation: Library) -> None:
        self._simulation = simulation
        self.fastest = float("inf")

    def run(self, *arguments: Any) -> str:
        """Time a run of the simulation."""
        begin = time.perf_counter()
        message = self._simulation.run(*arguments)
        self.fastest = min(self.fastest, time.perf_counter() - begin)
        return message


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()
