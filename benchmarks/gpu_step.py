"""Seconds of a training step and of its copies on a CUDA device, beside stock DeepSpeed's ZeRO-Offload and -Infinity.

    python benchmarks/gpu_step.py --size 355m --storage /mnt/nvme0

Each system trains GPT-2 in bf16 in a process of its own. Parts of a step are measured between waits for the device,
which the systems themselves do without. The copies are this package's, on their own: gradients to the host as fp32 and
parameters to the device as bf16, from registered memory and in pieces of a tasklet. Stock systems build cpu_adam and
async_io when they first run; one that fails is left out of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt2 import GPT2, SIZES, VOCAB
from machine import describe

SYSTEMS = ("smart_infinity", "zero_offload", "zero_infinity")
SUB_GROUP = BUCKET = 20_000_000
WARMUP = 2
PIECE_NUMEL = 1 << 20
PARTS = ("forward", "backward", "update")


class Probe:
    """Marks of the clock, each after the device has done what it was given."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self._marks: list[float] = []

    def begin(self) -> None:
        """A step begins."""
        self._marks.clear()
        self.mark()

    def mark(self) -> None:
        """A part of the step has ended."""
        torch.cuda.synchronize()
        self._marks.append(time.perf_counter())

    def end(self) -> None:
        """The step has ended."""
        self.mark()
        self.steps.append([b - a for a, b in zip(self._marks, self._marks[1:], strict=False)])

    def report(self) -> dict[str, Any]:
        """Medians of the steps after the warm-up."""
        measured = self.steps[WARMUP:]
        parts = dict(zip(PARTS, (statistics.median(part) for part in zip(*measured, strict=True)), strict=True))
        return {**parts, "total": statistics.median(sum(step) for step in measured)}


def batch(step: int, size: str) -> torch.Tensor:
    """4 x 512 tokens on the device."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB if size != "tiny" else 512, (4, 512), generator=generator).cuda()


def run_smart_infinity(size: str, steps: int, folder: str) -> dict[str, Any]:
    """This package, through Lightning's Trainer."""
    import lightning.pytorch as pl

    from lightning_smartinfinity import SmartInfinityStrategy

    probe = Probe()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2(size)

        def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
            probe.begin()
            return self.model(batch(index, size))

        def on_before_backward(self, loss: torch.Tensor) -> None:
            probe.mark()

        def on_after_backward(self) -> None:
            probe.mark()

        def on_train_batch_end(self, *_: Any) -> None:
            probe.end()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(steps, 1), batch_size=1)

    pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=SmartInfinityStrategy(folder, zero={"sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET}),
        precision="bf16-mixed",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(Module())
    return {**probe.report(), **copies(size)}


def copies(size: str) -> dict[str, float]:
    """Seconds of a step's copies, alone on a stream: a lower bound of what they can take."""
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
        for _ in range(2):  # the first warms up
            torch.cuda.synchronize()
            began = time.perf_counter()
            for begin in range(0, numel, PIECE_NUMEL):
                copy(nbytes=min(PIECE_NUMEL, numel - begin) * dtype.itemsize, **where)
            torch.cuda.synchronize()
            figures[name] = time.perf_counter() - began
        host.close()
    return figures


def run_stock(size: str, steps: int, folder: str, *, device: str) -> dict[str, Any]:
    """DeepSpeed with optimizer state on the CPU or on NVMe."""
    os.environ |= {"LOCAL_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29532")}
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    offload: dict[str, Any] = {"device": device, "pin_memory": True}
    if device == "nvme":
        offload |= {"nvme_path": folder, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    model = GPT2(size)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "aio": {"block_size": 8 * 1048576, "queue_depth": 32, "thread_count": 1, "overlap_events": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "sub_group_size": SUB_GROUP,
            "reduce_bucket_size": BUCKET,
        },
        "gradient_clipping": 0.0,
    }
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    probe = Probe()
    for step in range(steps):
        probe.begin()
        loss = engine(batch(step, size))
        probe.mark()
        engine.backward(loss)
        probe.mark()
        engine.step()
        probe.end()
    return probe.report()


def run(system: str, size: str, steps: int, folder: str) -> dict[str, Any]:
    """One system in this process."""
    if system == "smart_infinity":
        return run_smart_infinity(size, steps, folder)
    return run_stock(size, steps, folder, device="cpu" if system == "zero_offload" else "nvme")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, in seconds."""
    columns = [*PARTS, "total", "gradients", "parameters"]
    heads = [*(f"{part} s" for part in PARTS), "step s", "gradient copies s", "parameter copies s"]
    lines = ["| " + " | ".join(["system", *heads]) + " |", "|---" * (1 + len(heads)) + "|"]
    for system, row in rows.items():
        cells = [f"{row[key]:.3f}" if key in row else "" for key in columns]
        lines.append("| " + " | ".join([system, *cells]) + " |")
    return "\n".join(lines)


def measure(system: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """One system in a process of its own; None if it fails, having said why."""
    with tempfile.TemporaryDirectory(dir=options.storage or ".") as folder:
        command = [sys.executable, __file__, "--child", system, "--size", options.size, "--storage", folder]
        done = subprocess.run([*command, "--steps", str(options.steps)], capture_output=True, text=True)
    if done.returncode:
        print(f"{system} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}", file=sys.stderr)
        return None
    figures: dict[str, Any] = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    return figures


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="355m")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=WARMUP + 5, help=f"the first {WARMUP} are not measured")
    parser.add_argument("--storage", help="folder on the disk to measure; default: a temporary one here")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARMUP:
        parser.error(f"--steps {options.steps} leaves none to measure: the first {WARMUP} warm up")
    return options


def main() -> int:
    """Measures each system and prints a table below the machine.

    Returns:
        Exit status: 1 if a system failed, 2 without a CUDA device.
    """
    options = parse_options()
    if not torch.cuda.is_available():
        print("gpu_step.py measures copies from and to a CUDA device; torch finds none here.", file=sys.stderr)
        return 2
    if options.child:
        print("FIGURES " + json.dumps(run(options.child, options.size, options.steps, options.storage)))
        return 0
    measured = {system: measure(system, options) for system in options.systems}
    rows = {system: row for system, row in measured.items() if row is not None}
    print(f"{describe('torch', 'deepspeed')}, {torch.cuda.get_device_name()}")
    print(f"GPT-2 {options.size}, bf16, 4 x 512 tokens, {options.steps - WARMUP} measured steps\n")
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return int(len(rows) < len(measured))


if __name__ == "__main__":
    sys.exit(main())
