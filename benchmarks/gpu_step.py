"""Measures training steps on a CUDA device, beside DeepSpeed's ZeRO-Offload and ZeRO-Infinity and AdamW in its memory.

    python benchmarks/gpu_step.py --size 1.1B --storage /mnt/nvme0
    python benchmarks/gpu_step.py --size 3B --sequences 8 --checkpointing on --gpu-memory 24

Each system trains a Llama-shaped model in bf16 in a process of its own. smart_infinity keeps the parameters on the
device and all state on storage, and its update runs beside forward (backward: as gradients come). default also keeps
state in host memory, as far as that is free; int8 is its state format, and host and storage are where its parameters
are; budgets has them on storage, with 4 GB of them and 1 GB of gradients in memory.
zero_infinity has its optimizer state on storage and zero_infinity_parameters its parameters too, both pipelined, with
12 buffers, blocks of 8 MiB and a queue depth of 32. smart_infinity_memory and zero_offload have the state in host
memory, and adamw keeps everything in the device's. A step lasts from the end of the previous step to its own end, when
the device has done its work; updates that run beside the next step go on. Forward, backward and update are the parts of
a step as the host sees them, which the device may be behind: a wait of the host counts where it is met. The raw disk is
measured before each system, with equal reads and writes, and "of the disk" is what a step moves, in the step's time, as
a share of that. Stock systems build cpu_adam and async_io when they first run (unset TORCH_CUDA_ARCH_LIST if that
fails); one that fails is left out of the table.

This package's copies are also measured alone, as a lower bound: gradients to the host as fp32 and parameters to the
device as bf16, from registered memory and in pieces of a tasklet.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from comparison import Figures, compare, in_child, parse_options, several, write_figures
from machine import describe
from memory import Losses, build
from raw_disk import MIB, all_settings
from step import Disk, StepProbe
from torch import nn
from training import PARTS, WARMUP, train_stock, train_with_package

SYSTEMS: dict[str, dict[str, Any]] = {
    "smart_infinity": {},
    "smart_infinity_default": {"settings": {"transfer": {}}},
    "smart_infinity_backward": {"settings": {"overlap": "backward"}},
    "smart_infinity_int8": {"settings": {"state_format": "int8"}},
    "smart_infinity_memory": {"settings": {"transfer": {"dram_cache_bytes": "auto", "durability": "none"}}},
    "smart_infinity_host": {"offload_param": {"device": "cpu"}},
    "smart_infinity_storage": {"offload_param": {"device": "nvme"}},
    "smart_infinity_budgets": {
        "offload_param": {"device": "nvme"},
        "settings": {"transfer": {"dram_cache_bytes": 0, "gradient_bytes": 10**9, "parameter_bytes": 4 * 10**9}},
    },
    "adamw": {},
    "zero_offload": {"optimizer": "cpu"},
    "zero_infinity": {"optimizer": "nvme"},
    "zero_infinity_parameters": {"optimizer": "nvme", "parameters": "nvme"},
}
DEFAULT = (
    "smart_infinity_default",
    "smart_infinity",
    "smart_infinity_backward",
    "smart_infinity_int8",
    "smart_infinity_memory",
    "adamw",
)
DEFAULT += ("zero_offload", "zero_infinity")
SWITCH = ("off", "on")
PIECE_NUMEL = 1 << 20
RAW_SETTINGS = all_settings((4 * MIB, 16 * MIB), (4, 16))
COLUMNS = {  # key of a system's figures and number of digits
    "step s": ("total", 3),
    "forward s": ("forward", 3),
    "backward s": ("backward", 3),
    "update s": ("update", 3),
    "tokens/s": ("tokens_per_second", 0),
    "device GB": ("device_gb", 2),
    "host GB": ("peak_gb", 2),
    "host GB, set-up": ("setup_peak_gb", 2),
    "read B/param": ("read_per_parameter", 1),
    "written B/param": ("written_per_parameter", 1),
    "of the disk": ("of_disk", 2),
    "gradient copies s": ("gradients", 3),
    "parameter copies s": ("parameter_copies", 3),
}


class DeviceProbe(StepProbe):
    """Takes the time when the device has done its work, and the highest use of its memory after the warm-up."""

    def end(self) -> None:
        """End a step."""
        torch.cuda.synchronize()
        super().end()
        if len(self.steps) == WARMUP:
            torch.cuda.reset_peak_memory_stats()


def stock_config(folder: str, *, optimizer: str, parameters: str | None = None) -> dict[str, Any]:
    """Return DeepSpeed's settings for optimizer state, and parameters, on the CPU or on NVMe."""
    state: dict[str, Any] = {"device": optimizer, "pin_memory": True}
    if optimizer == "nvme":
        state |= {"nvme_path": folder, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    section = {"offload_optimizer": state}
    if parameters:
        section["offload_param"] = {"device": parameters, "nvme_path": folder, "pin_memory": True}
        # Its buffers hold the largest parameter, and as many as it reads ahead.
        section["offload_param"] |= {"buffer_size": 150_000_000, "buffer_count": 8}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "aio": {"block_size": 8 * 1048576, "queue_depth": 32, "thread_count": 1, "overlap_events": True},
        "zero_optimization": section,
    }


def train_on_device(steps: int, *, probe: DeviceProbe, batches: Any, model: nn.Module) -> None:
    """Train a bf16 model with fp32 master weights, all in the device's memory, with torch's fused AdamW."""
    params = list(model.parameters())
    masters = [param.detach().float() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for step in range(steps):
        probe.begin()
        loss = model(batches(step))
        probe.mark()
        loss.backward()
        probe.mark()
        for param, master in zip(params, masters, strict=True):
            master.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        probe.end()


def copies(numel: int) -> dict[str, float]:
    """Measure a step's copies alone on a stream: a lower bound of their time."""
    from lightning_smartinfinity.pipeline.parameters.cuda import link_to

    link = link_to(torch.device("cuda", torch.cuda.current_device()))
    assert link is not None
    figures = {}
    dtype = torch.bfloat16
    for name in ("gradients", "parameter_copies"):
        host = torch.empty(PIECE_NUMEL, dtype=dtype, pin_memory=True)
        on_device = torch.empty(PIECE_NUMEL, dtype=dtype, device="cuda")
        where = {"host": host.data_ptr(), "device": on_device.data_ptr(), "stream": link.current_stream()}
        copy = link.device.copy_to_host if name == "gradients" else link.device.copy_to_device
        for _ in range(2):  # the first round warms up
            torch.cuda.synchronize()
            began = time.perf_counter()
            for begin in range(0, numel, PIECE_NUMEL):
                copy(nbytes=min(PIECE_NUMEL, numel - begin) * dtype.itemsize, **where)
            torch.cuda.synchronize()
            figures[name] = time.perf_counter() - began
    return figures


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run one system in this process."""
    system, size, steps, folder = options.child, options.size, options.steps, options.storage
    how = dict(SYSTEMS[system])
    if options.gpu_memory:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gpu_memory * 1e9 / whole))
    probe, shape = DeviceProbe(steps), (options.sequences, options.tokens)

    def batches(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, 1000, shape, generator=generator).cuda()

    def model() -> Losses:
        return build(size, checkpointing=options.checkpointing == "on")

    with torch.device("meta"):
        numel = sum(param.numel() for param in model().parameters())
    extra = {}
    if system == "adamw":
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            on_device = model()
        train_on_device(steps, probe=probe, batches=batches, model=on_device)
    elif system.startswith("smart_infinity"):
        settings = {"overlap": "forward", **how.pop("settings", {})}
        common: dict[str, Any] = {"precision": "bf16-true", "settings": settings, "build": model}
        train_with_package(size, steps, folder, accelerator="cuda", probe=probe, batches=batches, **common, **how)
        extra = copies(numel)
    else:
        train_stock(size, steps, stock_config(folder, **how), probe=probe, batches=batches, build=model)
    free, whole = torch.cuda.mem_get_info()
    figures = probe.figures(numel)
    total = statistics.median(figures["total"])
    return {
        **{key: value for key, value in figures.items() if not isinstance(value, list)},
        **extra,
        **{part: statistics.median(figures[part]) for part in PARTS},
        "total": total,
        "seconds_of_steps": figures["total"],
        "tokens_per_second": options.sequences * options.tokens / total,
        "device_gb": torch.cuda.max_memory_allocated() / 1e9,
        "context_gb": (whole - free - torch.cuda.memory_reserved()) / 1e9,
    }


def rows(options: argparse.Namespace) -> dict[str, Figures | None]:
    """Measure the disk and each system in turn; None for one that fails."""
    found: dict[str, Figures | None] = {}
    with Disk.measured(Path(options.storage), settings=RAW_SETTINGS, nbytes=1024 * MIB) as disk:
        for system in options.systems:
            bandwidth = disk.gb_per_second()
            figures = found[system] = in_child(__file__, options, system)
            if figures is not None:
                per_parameter = figures["read_per_parameter"] + figures["written_per_parameter"]
                moved = per_parameter * figures["parameters"] / figures["total"] / 1e9
                figures |= {"raw_gb_per_second": bandwidth, "of_disk": moved / bandwidth}
            write_figures(options.json, rows=found)  # if a later one hangs, these are there
    return found


def main() -> int:
    """Measure each system and print a table below the machine.

    Returns:
        Exit status: 1 if a system failed, 2 without a CUDA device.
    """
    options = parse_options(
        __doc__,
        size={"default": "1.1B", "choices": None, "help": "a number of parameters, such as 355M or 3B"},
        systems=several(tuple(SYSTEMS), default=DEFAULT),
        tokens={"default": 2048, "help": "of a sequence"},
        sequences={"type": int, "default": 1, "help": "of a step"},
        checkpointing={"choices": SWITCH, "default": "off", "help": "recompute activations in backward"},
        gpu_memory={"type": float, "default": 0.0, "help": "GB of the device's memory that may be used; 0: all"},
    )
    if not torch.cuda.is_available():
        print("gpu_step.py measures training on a CUDA device; torch finds none here.", file=sys.stderr)
        return 2
    limit = f", {options.gpu_memory:g} GB of the device" if options.gpu_memory else ""
    recomputed = ", activations recomputed" if options.checkpointing == "on" else ""
    return compare(
        __file__,
        options,
        run=run,
        rows=lambda: rows(options),
        columns=COLUMNS,
        machine=lambda: f"{describe('torch', 'deepspeed')}, {torch.cuda.get_device_name()}",
        heading=f"Llama-shaped {options.size}, bf16, {options.sequences} x {options.tokens} tokens{recomputed}{limit}, "
        f"{options.steps - WARMUP} measured steps",
    )


if __name__ == "__main__":
    sys.exit(main())
