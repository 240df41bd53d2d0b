"""Peak memory, traffic and step time of training GPT-2, beside DeepSpeed's ZeRO-Infinity on the same machine.

    python benchmarks/peak_memory.py --size 355m --systems smart_infinity zero_infinity zero_infinity_pipelined

Each system trains in a process of its own, in bf16, on one sequence a step. smart_infinity_parameters is smart_infinity
with the parameters on storage too. ZeRO-Infinity needs libaio's headers and a C++ compiler: DeepSpeed builds async_io
and cpu_adam when it first runs, which takes minutes (TORCH_EXTENSIONS_DIR keeps them).

There are two peaks, because building a model may take more than training it: the resident set's high-water mark (VmHWM)
is read after set-up and the warm-up steps, reset to the present size, and read again after the measured steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comparison import compare, parse_options, several
from gpt2 import GPT2
from machine import describe
from training import WARMUP, Batches, Probe, tokens, train_stock, train_with_package

SYSTEMS = ("smart_infinity", "smart_infinity_parameters", "adamw", "zero_infinity", "zero_infinity_pipelined")
COLUMNS = {  # key of a system's figures and number of digits
    "forward s": ("forward", 2),
    "backward s": ("backward", 2),
    "update s": ("update", 2),
    "step s": ("total", 2),
    "read B/param": ("read_per_parameter", 1),
    "written B/param": ("written_per_parameter", 1),
    "peak RSS GB, set-up and warm-up": ("setup_peak_gb", 2),
    "peak RSS GB, measured steps": ("peak_gb", 2),
}


class MemoryProbe(Probe):
    """Records the clock and the kernel's counters during training steps."""

    def __init__(self) -> None:
        super().__init__()
        self._io: dict[str, int] = {}
        self._setup_peak = 0

    def begin(self) -> None:
        """Begin a step. After the warm-up, record the peak so far and restart it at the present size."""
        if len(self.steps) == WARMUP:
            self._setup_peak = resident("VmHWM")
            restart_peak()
            self._io = system_io()
        super().begin()

    def report(self, numel: int) -> dict[str, Any]:
        """Return medians and figures per parameter of the steps after the warm-up."""
        io, now = self._io, system_io()
        per_update = numel * len(self.steps[WARMUP:])
        return {
            **self.medians(),
            "read_per_parameter": (now["read_bytes"] - io["read_bytes"]) / per_update,
            "written_per_parameter": (now["write_bytes"] - io["write_bytes"]) / per_update,
            "setup_peak_gb": self._setup_peak / 1e9,
            "peak_gb": resident("VmHWM") / 1e9,
            "parameters": numel,
        }


def system_io() -> dict[str, int]:
    """Return the kernel's counters for this process: bytes that storage really moved."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def resident(key: str) -> int:
    """Return a memory figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def restart_peak() -> None:
    """Let ``VmHWM``, the peak of this process's memory, begin anew at the present size."""
    Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def train_in_memory(
    size: str,
    steps: int,
    *,
    probe: Probe,
    batches: Batches,
    clip: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Train a model with fp32 master weights and torch's fused AdamW; return the number of parameters.

    Args:
        size: One of ``gpt2.SIZES``.
        steps: Number of steps.
        probe: Probe that takes the times.
        batches: Function that makes the tokens of a step.
        clip: Largest norm of the gradients; None means that they are not clipped.
        dtype: Of the model. In fp32 its parameters are the masters.
    """
    model = GPT2(size).to(dtype)
    params = list(model.parameters())
    masters: list[torch.Tensor] = [param if dtype == torch.float32 else param.detach().float() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for step in range(steps):
        probe.begin()
        loss = model(batches(step))
        probe.mark()
        loss.backward()
        probe.mark()
        for param, master in zip(params, masters, strict=True):
            if master is not param:
                master.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                if master is not param:
                    param.copy_(master)
                else:
                    param.grad = None
        probe.end()
    return sum(param.numel() for param in params)


def zero_infinity_config(folder: str, *, pipelined: bool) -> dict[str, Any]:
    """Return DeepSpeed's settings for optimizer state on NVMe; ``pipelined`` adds deeper queues and larger blocks."""
    offload: dict[str, Any] = {"device": "nvme", "nvme_path": folder, "buffer_count": 4, "pin_memory": False}
    aio = {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
    if pipelined:
        offload |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        aio |= {"block_size": 8 * 1048576, "queue_depth": 32}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "aio": aio,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"offload_optimizer": offload, "overlap_comm": False},
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run one system in this process."""
    system, size, steps, folder = options.child, options.size, options.steps, options.storage
    probe = MemoryProbe()
    batches = partial(tokens, size=size, shape=(1, options.tokens))
    if system == "adamw":
        return probe.report(train_in_memory(size, steps, probe=probe, batches=batches))
    if system.startswith("smart_infinity"):
        zero = {"offload_param": {"device": "nvme"}} if system.endswith("parameters") else {}
        strategy = train_with_package(size, steps, folder, accelerator="cpu", probe=probe, batches=batches, **zero)
        return {**probe.report(strategy.state_numel), "held": strategy.host_bytes}
    os.environ["DS_ACCELERATOR"] = "cpu"
    config = zero_infinity_config(folder, pipelined=system.endswith("pipelined"))
    return probe.report(train_stock(size, steps, config, probe=probe, batches=batches))


def main() -> int:
    """Measure each system and print a table below the machine.

    Returns:
        Exit status: 1 if a system failed.
    """
    options = parse_options(__doc__, systems=several(SYSTEMS, default=["smart_infinity", "adamw"]))
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=partial(describe, "torch", "deepspeed"),
        heading=f"GPT-2 {options.size}, bf16, 1 x {options.tokens} tokens, {options.steps - WARMUP} measured steps",
    )


if __name__ == "__main__":
    sys.exit(main())
