"""Times a training step and its copies on a CUDA device, beside stock DeepSpeed's ZeRO-Offload and ZeRO-Infinity.

    python benchmarks/gpu_step.py --size 355m --storage /mnt/nvme0

Each system trains GPT-2 in bf16 in a process of its own. The parts of a step are measured with a wait for the device
after each, which the systems themselves do not make. This package's copies are also measured alone: gradients to the
host as fp32 and parameters to the device as bf16, from registered memory and in pieces of a tasklet. Stock systems
build cpu_adam and async_io when they first run; one that fails is left out of the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from comparison import compare, parse_options, several
from gpt2 import GPT2
from machine import describe
from training import PARTS, WARMUP, Probe, tokens, train_near_storage, train_stock

SYSTEMS = ("smart_infinity", "zero_offload", "zero_infinity")
PIECE_NUMEL = 1 << 20
COLUMNS = {  # key of a system's figures and number of digits
    **{f"{part} s": (part, 3) for part in PARTS},
    "step s": ("total", 3),
    "gradient copies s": ("gradients", 3),
    "parameter copies s": ("parameters", 3),
}


def stock_config(folder: str, *, device: str) -> dict[str, Any]:
    """Return DeepSpeed's settings for optimizer state on the CPU or on NVMe."""
    offload: dict[str, Any] = {"device": device, "pin_memory": True}
    if device == "nvme":
        offload |= {"nvme_path": folder, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "aio": {"block_size": 8 * 1048576, "queue_depth": 32, "thread_count": 1, "overlap_events": True},
        "zero_optimization": {"offload_optimizer": offload},
    }


def copies(size: str) -> dict[str, float]:
    """Measure a step's copies alone on a stream: a lower bound of their time."""
    from lightning_smartinfinity.transfer.cuda import link_to

    link = link_to(torch.device("cuda", torch.cuda.current_device()))
    assert link is not None
    numel = sum(param.numel() for param in GPT2(size).parameters())
    figures = {}
    for name, dtype in (("gradients", torch.float32), ("parameters", torch.bfloat16)):
        host = link.host_tensor(PIECE_NUMEL, dtype)
        on_device = torch.empty(PIECE_NUMEL, dtype=dtype, device="cuda")
        where = {"host": host.tensor.data_ptr(), "device": on_device.data_ptr(), "stream": link.current_stream()}
        copy = link.device.copy_to_host if name == "gradients" else link.device.copy_to_device
        for _ in range(2):  # the first round warms up
            torch.cuda.synchronize()
            began = time.perf_counter()
            for begin in range(0, numel, PIECE_NUMEL):
                copy(nbytes=min(PIECE_NUMEL, numel - begin) * dtype.itemsize, **where)
            torch.cuda.synchronize()
            figures[name] = time.perf_counter() - began
        host.close()
    return figures


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run one system in this process, with 4 x 512 tokens on the device."""
    system, size, steps, folder = options.child, options.size, options.steps, options.storage
    probe = Probe(torch.cuda.synchronize)

    def batches(step: int) -> torch.Tensor:
        return tokens(step, size, (4, 512)).cuda()

    if system == "smart_infinity":
        train_near_storage(size, steps, folder, accelerator="cuda", probe=probe, batches=batches)
        return {**probe.medians(), **copies(size)}
    config = stock_config(folder, device="cpu" if system == "zero_offload" else "nvme")
    train_stock(size, steps, config, probe=probe, batches=batches)
    return probe.medians()


def main() -> int:
    """Measure each system and print a table below the machine.

    Returns:
        Exit status: 1 if a system failed, 2 without a CUDA device.
    """
    options = parse_options(__doc__, size={"default": "355m"}, systems=several(SYSTEMS), tokens=None)
    if not torch.cuda.is_available():
        print("gpu_step.py measures copies from and to a CUDA device; torch finds none here.", file=sys.stderr)
        return 2
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=lambda: f"{describe('torch', 'deepspeed')}, {torch.cuda.get_device_name()}",
        heading=f"GPT-2 {options.size}, bf16, 4 x 512 tokens, {options.steps - WARMUP} measured steps",
    )


if __name__ == "__main__":
    sys.exit(main())
