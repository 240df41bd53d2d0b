"""Measures offloading what forward saves for backward: memory, time and bytes, beside recomputation and other hooks.

    python benchmarks/activations.py --size 124m 355m --shape 4 1024 --loss whole chunked --storage /mnt/nvme0
    python benchmarks/activations.py --size 3.6b --shape 4 1024 --loss chunked --host-bytes 16GB    # on a GPU
    python benchmarks/activations.py --throttle 0.1 0.3 1 --size 124m --storage /mnt/nvme0

GPT-2 runs forward and backward, without an optimizer, in bf16. On processors without instructions for bf16 that takes
more than ten times as long as in fp32; `--precision fp32` measures the times there. `chunked` computes logits and loss
of 256 tokens at a time under torch.utils.checkpoint, so that no more logits live at once. The systems:

- `plain` is autograd alone, and `ours` is OffloadedActivations;
- `checkpoint` is torch.utils.checkpoint around every block, and `both` is `ours` around that;
- `hooks` is torch's tutorial: a file of torch.save for every saved tensor;
- `save_on_cpu` is torch.autograd.graph.save_on_cpu(pin_memory=True), only on a CUDA device.

Each system runs in a process of its own for its memory. Another process runs all of them in turns for the times,
because the speed of a shared machine drifts. `ours` and `both` first run until it is settled what they offload. "Held"
is the most that autograd keeps at once, apart from parameters and the batch: what is saved, the pool, and what is read
back. Hooks do not see what a checkpoint recomputes in backward. "VmHWM above" is beside the same system's run on 32
tokens. CPU seconds are those of all threads; where other work runs beside the benchmark, they say more than the clock
about what a system adds.

On a GPU gradients are dropped as they come, and the memory of the device is what its allocator holds, with what copies
still use: all of it, and above the parameters. "Of predicted" is beside the time that `keep="auto"` has predicted.

With `--throttle`, requests to storage take turns at these rates, reads and writes together, and `keep="auto"` has to
find out what pays. Only a core that was built with SMART_INFINITY_TESTING can do that.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from comparison import Figures, in_child, parse_options, report, several, show
from gpt2 import CONTEXT, SIZES
from machine import describe
from peak_memory import resident, restart_peak
from saving_systems import PRECISIONS, Runner, running
from training import WARMUP

SYSTEMS = ("plain", "ours", "checkpoint", "both", "hooks", "save_on_cpu")
MEMORY_STEPS = WARMUP + 1
COLUMNS = {  # key of a system's figures, digits
    "held GB": ("held_gb", 3),
    "x plain": ("held_ratio", 2),
    "VmHWM GB": ("peak_gb", 2),
    "VmHWM above GB": ("above_gb", 2),
    "x plain ": ("above_ratio", 2),
    "step s": ("seconds", 2),
    "x plain  ": ("seconds_ratio", 3),
    "overhead s": ("overhead", 2),
    "CPU s": ("cpu", 2),
    "x plain   ": ("cpu_ratio", 3),
    "written GB": ("written_gb", 2),
    "of saved": ("written_ratio", 2),
    "of predicted s": ("of_predicted", 3),
    "tokens/s": ("tokens_per_second", 0),
    "device GB": ("device_gb", 2),
    "device GB of activations": ("device_above_gb", 2),
    "x plain    ": ("device_ratio", 2),
}
THROTTLED_COLUMNS = {
    "plain s": ("plain", 3),
    "ours s": ("seconds", 3),
    "x plain": ("ratio", 3),
    "predicted s": ("predicted", 3),
    "measured / predicted": ("of_predicted", 3),
    "held GB": ("held_gb", 3),
    "predicted GB": ("predicted_gb", 3),
    "held / predicted": ("held_of_predicted", 3),
    "held x plain": ("held_ratio", 2),
    "offloaded GB": ("offloaded_gb", 3),
}


def run(options: argparse.Namespace) -> Figures:
    """Run a child: the memory of one system, or the times of several in turns."""
    systems = options.child.split(",")
    with running(options, systems) as runner:
        runner.settle()
        if options.rate:
            return throttled(runner, options.steps)
        if len(systems) > 1:
            take_turns(runner, options.steps)
            return {name: runner.clock.medians(name) | predicted(runner, name) for name in systems}
        return memory(runner, systems[0])


def take_turns(runner: Runner, steps: int) -> None:
    systems = list(runner.clock.seconds)
    for number in range(steps):
        for name in systems[number % len(systems) :] + systems[: number % len(systems)]:
            runner.step(name, number)


def predicted(runner: Runner, system: str) -> Figures:
    """Return the time that the choice of a system predicts, if it makes one."""
    choice = runner.ours[system].activations.choice if system in runner.ours else None
    return {} if choice is None else {"predicted": choice.seconds}


def memory(runner: Runner, system: str) -> Figures:
    """Return the memory of a system, and what it wrote in a step, after the warm-up."""
    for number in range(MEMORY_STEPS):
        if number == WARMUP:
            restart_peak()
            before = runner.restart_device_peak()
            for each in runner.ours.values():
                each.restart_peak()
        written = runner.written_bytes(system)
        runner.step(system, number)
    peak, written = resident("VmHWM"), runner.written_bytes(system) - written
    device = runner.device_peak()
    on_device = {"device_gb": device / 1e9, "device_above_gb": (device - before) / 1e9} if device else {}
    return {"peak_gb": peak / 1e9, "written_gb": written / 1e9, **on_device, **runner.held(system)}


def throttled(runner: Runner, steps: int) -> Figures:
    """Compare what the choice predicts with what came true, on slow storage."""
    take_turns(runner, steps)
    ours = runner.ours["ours"]
    choice = ours.activations.choice
    assert choice is not None, "it was settled"
    ours.restart_peak()
    before = ours.activations.traffic().offloaded_bytes
    runner.step("ours", steps)
    offloaded = ours.activations.traffic().offloaded_bytes - before
    plain, seconds = (runner.clock.medians(name)["seconds"] for name in ("plain", "ours"))
    held = ours.peak / 1e9
    return {
        "plain": plain,
        "seconds": seconds,
        "ratio": seconds / plain,
        "predicted": choice.seconds,
        "of_predicted": seconds / choice.seconds,
        "held_gb": held,
        "predicted_gb": choice.peak_bytes / 1e9,
        "held_of_predicted": held / (choice.peak_bytes / 1e9),
        "held_ratio": held / runner.held("plain")["held_gb"],
        "offloaded_gb": offloaded / 1e9,
    }


def child_options(options: argparse.Namespace, *, size: str, loss: str, rate: float) -> argparse.Namespace:
    """Return the options of a child that runs one size and loss, with storage at a rate; 0: as fast as it is."""
    names = ("storage", "shape", "steps", "precision", "keep", "host_bytes")
    shared = {name: getattr(options, name) for name in names}
    return argparse.Namespace(**shared, size=size, loss=loss, rate=rate)


def compare_systems(options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures of all systems, sizes and losses; a system that fails is left out."""
    rows = {}
    for size, loss in ((size, loss) for size in options.size for loss in options.loss):
        common = child_options(options, size=size, loss=loss, rate=0.0)
        found = {name: in_child(__file__, common, name) for name in options.systems}
        # On a GPU, what counts is the device's memory, of which torch keeps the books.
        measured_small = () if torch.cuda.is_available() else options.systems
        small = {name: in_child(__file__, common, name, shape=[1, 32]) for name in measured_small}
        seconds = in_child(__file__, common, ",".join(options.systems)) if len(found) > 1 else None
        for name, figures in found.items():
            if figures is not None:
                figures |= {"above_gb": figures["peak_gb"] - small[name]["peak_gb"]} if small.get(name) else {}
                figures |= seconds[name] if seconds else {}
                figures |= {"tokens_per_second": math.prod(options.shape) / figures["seconds"]} if seconds else {}
                rows[f"{size}, {loss}, {name}"] = beside(figures, found.get("plain"))
    return rows


def beside(figures: Figures, plain: Figures | None) -> Figures:
    """Return figures with their ratios to those of autograd alone."""
    if plain is None:
        return figures
    names = {"held_ratio": "held_gb", "above_ratio": "above_gb", "seconds_ratio": "seconds", "cpu_ratio": "cpu"}
    names["device_ratio"] = "device_above_gb"
    ratios = {ratio: figures[name] / plain[name] for ratio, name in names.items() if plain.get(name)}
    if "seconds" in figures:
        ratios["overhead"] = figures["seconds"] - plain["seconds"]
    if "predicted" in figures:
        ratios["of_predicted"] = figures["seconds"] / figures["predicted"]
    return {**figures, **ratios, "written_ratio": figures["written_gb"] / plain["saved_gb"]}


def compare_rates(options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures on slow storage, for every size, loss and rate."""
    rows = {}
    for size in options.size:
        for loss in options.loss:
            for rate in options.throttle:
                common = child_options(options, size=size, loss=loss, rate=rate * 1e9)
                figures = in_child(__file__, common, "plain,ours")
                if figures is not None:
                    rows[f"{size}, {loss}, {rate:g} GB/s"] = figures
    return rows


def size_or_auto(text: str) -> int | str:
    """Return a number of bytes, or text such as 8GB or auto as it is."""
    return int(text) if text.isdecimal() else text


def main() -> int:
    """Measure what was asked for, and print a table below the machine.

    Returns:
        Exit status: 1 if something failed.
    """
    options = parse_options(
        __doc__,
        tokens=None,
        size={"nargs": "+", "choices": SIZES, "default": ["124m"]},
        shape={"nargs": 2, "type": int, "default": [4, CONTEXT], "metavar": ("BATCH", "LENGTH")},
        loss={"nargs": "+", "choices": ("whole", "chunked"), "default": ["whole"]},
        systems=several(SYSTEMS, default=SYSTEMS if torch.cuda.is_available() else SYSTEMS[:-1]),
        precision={"choices": PRECISIONS, "default": "bf16"},
        keep={"type": size_or_auto, "default": "auto", "help": "bytes of the newest tensors that ours keeps"},
        host_bytes={"type": size_or_auto, "default": "auto", "help": "bytes of host memory of ours"},
        throttle={"nargs": "+", "type": float, "metavar": "GBPS", "help": "measure keep='auto' on slow storage"},
        rate={"type": float, "default": 0.0, "help": argparse.SUPPRESS},
    )
    if options.child:
        options.size, options.loss = options.size[0], options.loss[0]
        report(run(options))
        return 0
    machine = describe("torch")
    print(machine, flush=True)
    steps = options.steps - WARMUP
    if options.throttle:
        heading, columns, compared = "GPT-2 on slow storage, keep='auto'", THROTTLED_COLUMNS, compare_rates
    else:
        heading, columns, compared = "GPT-2", COLUMNS, compare_systems
    rows = compared(options)
    heading += ", {}, {} x {} tokens, medians of {} steps".format(options.precision, *options.shape, steps)
    show(rows, columns, heading=heading, path=options.json, machine=machine)
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
