"""Peak memory, traffic and step time of training GPT-2, beside DeepSpeed's ZeRO-Infinity on the same machine.

    python benchmarks/peak_memory.py --size 355m --systems smart_infinity zero_infinity zero_infinity_pipelined

Each system trains in a process of its own, bf16, batch 1 x 32 tokens. smart_infinity_parameters is smart_infinity with
the parameters on storage too. ZeRO-Infinity needs libaio's headers and a C++ compiler: DeepSpeed builds async_io and
cpu_adam when it first runs (minutes; TORCH_EXTENSIONS_DIR keeps them).

There are two peaks, because building a model may take more than training it: the resident set's high-water mark (VmHWM)
is read after set-up and the warm-up steps, reset to the present size, and read again after the measured steps.
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

SYSTEMS = ("smart_infinity", "smart_infinity_parameters", "adamw", "zero_infinity", "zero_infinity_pipelined")
SUB_GROUP = BUCKET = 20_000_000
WARMUP = 2


class Probe:
    """Marks of the clock and the kernel's counters through training steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._marks: list[float] = []
        self._io: dict[str, int] = {}
        self._setup_peak = 0

    def begin(self) -> None:
        """A step begins. After the warm-up the peak so far is noted and starts anew from the present size."""
        if len(self.steps) == WARMUP:
            self._setup_peak = resident("VmHWM")
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: see proc(5)
            self._io = system_io()
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        """Forward or backward has ended."""
        self._marks.append(time.perf_counter())

    def end(self) -> None:
        """The step has ended."""
        self.mark()
        parts = [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]
        self.steps.append(dict(zip(("forward", "backward", "update"), parts, strict=True)))

    def report(self, numel: int) -> dict[str, Any]:
        """Medians and figures per parameter of the steps after the warm-up."""
        measured = self.steps[WARMUP:]
        io, now = self._io, system_io()
        per_update = numel * len(measured)
        return {
            **{part: statistics.median(step[part] for step in measured) for part in measured[0]},
            "total": statistics.median(sum(step.values()) for step in measured),
            "read_per_parameter": (now["read_bytes"] - io["read_bytes"]) / per_update,
            "written_per_parameter": (now["write_bytes"] - io["write_bytes"]) / per_update,
            "setup_peak_gb": self._setup_peak / 1e9,
            "peak_gb": resident("VmHWM") / 1e9,
            "parameters": numel,
        }


def system_io() -> dict[str, int]:
    """What the kernel counts for this process: bytes that storage really moved."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def resident(key: str) -> int:
    """A memory figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def batch(step: int, size: str) -> torch.Tensor:
    """1 x 32 tokens."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB if size != "tiny" else 512, (1, 32), generator=generator)


def run_adamw(size: str, steps: int, folder: str) -> dict[str, Any]:
    """All in memory: bf16 model, fp32 masters, torch's fused AdamW."""
    model = GPT2(size).bfloat16()
    params = list(model.parameters())
    masters = [param.detach().float() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    probe = Probe()
    for step in range(steps):
        probe.begin()
        loss = model(batch(step, size))
        probe.mark()
        loss.backward()
        probe.mark()
        for param, master in zip(params, masters, strict=True):
            master.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        probe.end()
    return probe.report(sum(param.numel() for param in params))


def zero_infinity_config(folder: str, *, pipelined: bool) -> dict[str, Any]:
    """DeepSpeed's settings for optimizer state on NVMe; pipelined: also deeper queues and larger blocks."""
    offload: dict[str, Any] = {"device": "nvme", "nvme_path": folder, "buffer_count": 4, "pin_memory": False}
    aio = {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
    if pipelined:
        offload |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        aio |= {"block_size": 8 * 1048576, "queue_depth": 32}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "aio": aio,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "sub_group_size": SUB_GROUP,
            "reduce_bucket_size": BUCKET,
            "overlap_comm": False,
        },
        "gradient_clipping": 0.0,
    }


def run_zero_infinity(size: str, steps: int, folder: str, *, pipelined: bool = False) -> dict[str, Any]:
    """Stock DeepSpeed."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29531")}
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = GPT2(size)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-4),
        config=zero_infinity_config(folder, pipelined=pipelined),
    )
    numel = sum(param.ds_numel for param in model.parameters())
    probe = Probe()
    for step in range(steps):
        probe.begin()
        loss = engine(batch(step, size))
        probe.mark()
        engine.backward(loss)
        probe.mark()
        engine.step()
        probe.end()
    return probe.report(numel)


def lightning_module(size: str, steps: int, probe: Probe) -> Any:
    """The model as a LightningModule whose hooks mark the parts of a step. Lightning is imported by its system only."""
    import lightning.pytorch as pl

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

    return Module()


def run_smart_infinity(size: str, steps: int, folder: str, **zero: Any) -> dict[str, Any]:
    """This package, through Lightning's Trainer."""
    import lightning.pytorch as pl

    from lightning_smartinfinity import SmartInfinityStrategy

    probe = Probe()
    strategy = SmartInfinityStrategy(folder, zero={"sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET, **zero})
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(lightning_module(size, steps, probe))
    return {**probe.report(strategy.state_numel), "held": strategy.host_bytes}


def run(system: str, size: str, steps: int, folder: str) -> dict[str, Any]:
    """One system in this process."""
    if system == "adamw":
        return run_adamw(size, steps, folder)
    if system == "smart_infinity":
        return run_smart_infinity(size, steps, folder)
    if system == "smart_infinity_parameters":
        return run_smart_infinity(size, steps, folder, offload_param={"device": "nvme"})
    return run_zero_infinity(size, steps, folder, pipelined=system.endswith("pipelined"))


COLUMNS = {  # of the table: key of a system's figures, digits
    "forward s": ("forward", 2),
    "backward s": ("backward", 2),
    "update s": ("update", 2),
    "step s": ("total", 2),
    "read B/param": ("read_per_parameter", 1),
    "written B/param": ("written_per_parameter", 1),
    "peak RSS GB, set-up and warm-up": ("setup_peak_gb", 2),
    "peak RSS GB, measured steps": ("peak_gb", 2),
}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(["system", *COLUMNS]) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for system, row in rows.items():
        cells = [f"{row[key]:.{digits}f}" for key, digits in COLUMNS.values()]
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
    print(f"{system} done", file=sys.stderr)
    figures: dict[str, Any] = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    return figures


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["smart_infinity", "adamw"])
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
        Exit status: 1 if a system failed.
    """
    options = parse_options()
    if options.child:
        print("FIGURES " + json.dumps(run(options.child, options.size, options.steps, options.storage)))
        return 0
    measured = {system: measure(system, options) for system in options.systems}
    rows = {system: row for system, row in measured.items() if row is not None}
    print(describe("torch", "deepspeed"))
    print(f"GPT-2 {options.size}, bf16, {options.steps - WARMUP} measured steps\n")
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return int(len(rows) < len(measured))


if __name__ == "__main__":
    sys.exit(main())
