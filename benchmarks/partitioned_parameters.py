"""Measures what it costs that partitioned parameters answer user code as in memory.

- ``classes``: a step of a net of small layers, each of two parameters, with all that lets parameters answer and without
  it. Steps of both kinds alternate in one process, on one core.
- ``handshake``: how long the norm of a parameter takes on each of two ranks, with and without the agreement of the
  ranks on what is read, which turns a read on one rank alone into an error.

Usage::

    python benchmarks/partitioned_parameters.py classes [--layers 5000] [--width 8] [--rows 2] [--rounds 24]
    python benchmarks/partitioned_parameters.py handshake [--widths 64 1024 2048] [--rounds 60]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from machine import describe

from lightning_smartinfinity import SmartInfinityFabricStrategy

METHODS = ("partition", "all_gather", "all_gather_coalesced")


class Silent(torch.nn.Parameter):
    """A parameter of ZeRO-3 alone: its class stays, and nothing answers for it."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["classes", "handshake"])
    parser.add_argument("--layers", type=int, default=5000)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of the batch")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 1024, 2048])
    parser.add_argument("--rounds", type=int, help="default: 24 of classes, 60 of handshake")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "LOCAL_RANK" not in os.environ:
        print(describe("torch"), flush=True)
    if "STORAGE_OF_BENCHMARK" not in os.environ:  # a second rank starts this script again
        os.environ["STORAGE_OF_BENCHMARK"] = tempfile.mkdtemp()
    try:
        if options.part == "classes":
            print("| parameters | kept whole | without, CPU s | with / without | quartiles | more, us each |")
            print("|---|---|---|---|---|---|")
            for threshold in (0, 10**6):
                layers = [torch.nn.Linear(options.width, options.width) for _ in range(options.layers)]
                classes(torch.nn.Sequential(*layers), options.rows, threshold, options.rounds or 24)
        else:
            handshake(options.widths, options.rounds or 60)
    finally:
        shutil.rmtree(os.environ["STORAGE_OF_BENCHMARK"], ignore_errors=True)


def trained(net: torch.nn.Module, devices: int, threshold: int) -> tuple[L.Fabric, Any, Any]:
    """Return a Fabric, and a net and its optimizer that it has set up."""
    strategy = SmartInfinityFabricStrategy(
        os.environ["STORAGE_OF_BENCHMARK"], overlap="none", zero={"stage3_param_persistence_threshold": threshold}
    )
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    return fabric, *fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))


def classes(net: torch.nn.Sequential, rows: int, threshold: int, rounds: int) -> None:
    """Print a row: a step with the classes beside one without them."""
    from lightning_smartinfinity.zero3.engine import portable, training

    width = net[0].in_features
    fabric, model, optimizer = trained(net, 1, threshold)
    batch, params = torch.randn(rows, width), list(net.parameters())
    answering = {param: [param.__dict__[name] for name in METHODS] for param in params}
    parts = {
        (portable, "engine_at_work"): nullcontext,
        (training, "engine_at_work"): nullcontext,
        (training, "refuse_late_parameters"): ignore,
    }
    functions = {part: getattr(*part) for part in parts}

    def step() -> float:
        start = time.process_time()
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    def switch(*, on: bool) -> None:
        for (module, name), function in (functions if on else parts).items():
            setattr(module, name, function)
        for param, methods in answering.items():
            param.__dict__.update(
                (name, method if on else method.original) for name, method in zip(METHODS, methods, strict=True)
            )
            param.__class__ = param.__dict__["_classes"].answering if on else Silent
            if on:
                param.ds_status = param.__dict__["ds_status"]

    ratios, alone, more = [], [], []
    for number in range(rounds + 1):
        seconds = {}
        for on in (True, False) if number % 2 else (False, True):
            switch(on=on)
            step()
            seconds[on] = step()
        if number:  # the first round warms up
            ratios.append(seconds[True] / seconds[False])
            alone.append(seconds[False])
            more.append((seconds[True] - seconds[False]) / len(params))
    low, middle, high = statistics.quantiles(ratios)
    kept = "all" if threshold else "none"
    print(
        f"| {len(params)} | {kept} | {statistics.median(alone):.3f} | {middle:.4f} | {low:.3f} to {high:.3f} "
        f"| {1e6 * statistics.median(more):.1f} |",
        flush=True,
    )
    fabric.strategy.close()


def ignore(*_: object) -> None:
    """Stand for a function that the step is without."""


def handshake(widths: list[int], rounds: int) -> None:
    """Print a row for each width of a layer: a read on two ranks, with and without their agreement."""
    from lightning_smartinfinity.zero3.parameters import gathering

    agree = gathering.agree_to_gather
    ways: dict[str, Callable[..., None]] = {"with": agree, "without": ignore}
    net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for width in widths])
    fabric, _, _ = trained(net, 2, 0)
    if fabric.global_rank == 0:
        print("| elements | without, us | with, us | ratio |\n|---|---|---|---|")
    for layer in net:
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, function in ways.items():
                gathering.agree_to_gather = function
                start = time.perf_counter()
                float(layer.weight.detach().norm())
                times[way].append(time.perf_counter() - start)
        with_it, without = (1e6 * statistics.median(times[way]) for way in ("with", "without"))
        if fabric.global_rank == 0:
            print(f"| {layer.weight.numel()} | {without:.0f} | {with_it:.0f} | {with_it / without:.2f} |", flush=True)
    gathering.agree_to_gather = agree
    fabric.strategy.close()


if __name__ == "__main__":
    main()
