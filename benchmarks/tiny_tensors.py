"""Measures what hooks of activations cost where a model saves thousands of tiny tensors.

    python benchmarks/tiny_tensors.py --steps 6 --storage /mnt/nvme0

Autograd alone, hooks that only return what they are given, and OffloadedActivations take turns, with nothing large
beside the tiny tensors and behind one large one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from comparison import Figures, parse_options, show
from machine import describe
from saving_systems import Clock
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from training import WARMUP

from lightning_smartinfinity.activations import OffloadedActivations

LARGE_NUMEL = 1 << 20
TINY_FACTOR = 10  # short steps vary more, so there are more of them
COLUMNS = {
    "plain ms": ("plain", 1),
    "empty hooks ms": ("empty", 1),
    "x plain": ("empty_ratio", 3),
    "ours ms": ("ours", 1),
    "x plain ": ("ratio", 3),
}


class Tiny(nn.Module):
    """Saves tiny tensors, and before them one large one if its batch is large."""

    def __init__(self, num_tiny: int) -> None:
        super().__init__()
        self._num_tiny = num_tiny

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (2 * x).sin()[:8]
        for _ in range(self._num_tiny):
            y = y.sin()
        return y.sum()


def compare(options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures of tiny tensors, alone and behind a large one, beside those of empty hooks."""
    model, rows = Tiny(options.tensors), {}
    for name, numel in {"nothing large": 8, "one large tensor": LARGE_NUMEL}.items():
        x = torch.randn(numel, requires_grad=True)
        clock = Clock(["plain", "empty", "ours"])
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.storage))
            activations = OffloadedActivations([folder], module=model)
            stack.callback(activations.close)
            hooks = {
                "plain": nullcontext,
                "empty": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
                "ours": partial(activations.forward, x),
            }
            for number in range(WARMUP + TINY_FACTOR * (options.steps - WARMUP)):
                for system in sorted(hooks, reverse=bool(number % 2)):
                    with clock.step(system):
                        with hooks[system]():
                            loss = model(x)
                        loss.backward()
        plain, empty, ours = (1e3 * clock.medians(system)["seconds"] for system in ("plain", "empty", "ours"))
        rows[name] = {
            "plain": plain,
            "empty": empty,
            "empty_ratio": empty / plain,
            "ours": ours,
            "ratio": ours / plain,
        }
    return rows


def main() -> int:
    """Print a table below the machine.

    Returns:
        Exit status: 0.
    """
    options = parse_options(__doc__, size=None, tokens=None, child=None, tensors={"type": int, "default": 10_000})
    machine = describe("torch")
    print(machine, flush=True)
    rows = compare(options)
    show(
        rows,
        COLUMNS,
        heading=f"{options.tensors} tiny tensors, medians of {TINY_FACTOR * (options.steps - WARMUP)} steps",
        path=options.json,
        machine=machine,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
