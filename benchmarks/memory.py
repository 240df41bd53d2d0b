"""Peak memory of every phase of a training, as the model grows: set-up, steps, saving, resuming, exporting.

    python benchmarks/memory.py --sizes 124M 355M 1.1B --storage /mnt/nvme0 --json memory.json
    python benchmarks/memory.py --sizes 2.9B --systems budgets --state-format int8 --durability none
    python benchmarks/memory.py --sizes 1.1B --from-pretrained --steps 1

A Llama-shaped model of 32,000 tokens trains in bf16-true on one sequence, by each system in a process of its own; two
further processes resume from its checkpoint for one step and export it. "in_memory" has parameters and gradients in
memory; "gradients" has a budget of gradients; "budgets" has its parameters on storage, too; "zero_infinity" is stock
DeepSpeed with state and parameters on storage, pipelined, with torch's fused AdamW, and only steps are measured of it.
Its async_io is built when it first runs, which needs libaio's header and takes minutes.

Peaks are those of the resident set (VmHWM), reset between the phases. "limit" is 1.1 GB for imports and the ring, twice
the parameters and the gradient of the largest module, the logits, and the budgets. A step lasts from one batch's end to
the next, as the median after two.

With --from-pretrained the model is loaded by transformers from sharded safetensors in bf16, made once for each size and
removed in the end, instead of being built from random numbers. "different" counts the parameters of which any bit is
not that of the files after set-up; a process of its own compares them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from comparison import Figures, measure, report, table, write_figures
from machine import describe
from peak_memory import resident, restart_peak, system_io, zero_infinity_config
from sharded_weights import make_folder, num_different
from torch import nn
from training import WARMUP, Probe, quiet_trainer, train_stock

SYSTEMS = ("in_memory", "gradients", "budgets", "zero_infinity")
PHASES = ("setup", "steps", "saving", "resuming", "exporting")
BASE = 1_100_000_000
STOCK_BUFFERS = 16
STOCK_LIVE = {
    "stage3_max_live_parameters": 100_000_000,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 30_000_000,
}
COLUMNS: dict[str, tuple[str, int]] = {
    **{f"{phase}, GB": (phase, 2) for phase in PHASES},
    "limit, GB": ("limit", 2),
    "step s": ("seconds", 2),
    "x in_memory": ("against_memory", 2),
    "read B/param": ("read", 1),
    "written B/param": ("written", 1),
    "different": ("different", 0),
}


class Losses(nn.Module):
    """Returns a causal language model's loss on tokens.

    Args:
        model: A model of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def build(size: str, *, weights: Path | None = None, checkpointing: bool = False) -> Losses:
    """Build a Llama-shaped model of about that many parameters, or load it from a folder of that model."""
    from lightning_smartinfinity.planning.survey.models import find_source

    if weights is not None:
        from transformers import AutoModelForCausalLM

        return Losses(AutoModelForCausalLM.from_pretrained(weights).train())
    source = find_source(size)
    assert source.build is not None
    model: Any = source.build()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return Losses(model)


def peak() -> int:
    """Return the highest resident memory since the last call, in bytes, and restart it at the present size."""
    highest = resident("VmHWM")
    restart_peak()
    return highest


def strategy_of(options: argparse.Namespace, system: str, folder: Path) -> Any:
    """Return the strategy of one of this package's systems."""
    from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig

    transfer: dict[str, Any] = {"durability": options.durability, "dram_cache_bytes": 0}
    if system != "in_memory":
        transfer["gradient_bytes"] = options.gradient_bytes
    if system == "budgets":
        transfer["parameter_bytes"] = options.parameter_bytes
    zero = {"offload_param": {"device": "nvme"}} if system == "budgets" else None
    return SmartInfinityStrategy(
        folder / "storage",
        state_format=options.state_format,
        overlap=options.overlap,
        transfer=TransferConfig(**transfer),
        zero=zero,
    )


def fit(options: argparse.Namespace, system: str, size: str, folder: Path, what: str) -> Figures:
    """Train and save, resume for a step, or compare weights, in this process; return peaks, bytes and seconds."""
    import deepspeed  # noqa: F401
    import lightning.pytorch as pl
    import transformers  # noqa: F401

    found: Figures = {}
    ends: list[float] = []
    io: list[dict[str, int]] = []
    num_batches = WARMUP + options.steps + 1
    num_steps = {"train": num_batches - 1, "resume": num_batches, "compare": 1}[what]

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            self.model = build(size, weights=options.weights)

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(tokens)  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randint(0, 1000, (num_batches, options.tokens)), batch_size=1)

        def on_train_start(self) -> None:
            found["setup"] = peak()
            if what == "compare":
                found["different"] = num_different(self.model.model, options.weights)

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())
            io.append(system_io())

    strategy = strategy_of(options, system, folder)
    clip = 1.0 if options.clip == "on" else None
    common = {"precision": "bf16-true", "gradient_clip_val": clip}
    trainer = quiet_trainer(folder, strategy, max_steps=num_steps, **common)
    module = Module()
    trainer.fit(module, ckpt_path=folder / "a.ckpt" if what == "resume" else None)
    found["steps"] = peak()
    if what == "compare":
        strategy.close()
        return {"different": found["different"]}
    if what == "resume":
        return {"resuming": max(found.values())}
    trainer.save_checkpoint(folder / "a.ckpt")
    found["saving"] = peak()
    moved = {key: (io[-1][key] - io[WARMUP - 1][key]) / options.steps for key in ("read_bytes", "write_bytes")}
    numel = strategy.state_numel
    strategy.close()
    return {
        **found,
        "seconds": statistics.median(after - before for before, after in pairwise(ends[WARMUP - 1 :])),
        "read": moved["read_bytes"] / numel,
        "written": moved["write_bytes"] / numel,
        "parameters": numel,
    }


def export(folder: Path) -> Figures:
    """Export the checkpoint by the command."""
    from lightning_smartinfinity.cli.main import main as command

    command(["export", str(folder / "a.ckpt"), str(folder / "exported")])
    return {"exporting": peak()}


def stock(options: argparse.Namespace, size: str, folder: Path) -> Figures:
    """Train with stock DeepSpeed; return the peaks of set-up with the warm-up, and of the other steps."""

    class Steps(Probe):
        def begin(self) -> None:
            if len(self.steps) == WARMUP:
                found["setup"] = peak()
            super().begin()

    found: Figures = {}
    probe = Steps()
    config = zero_infinity_config(str(folder), pipelined=True)
    config["gradient_clipping"] = 1.0 if options.clip == "on" else 0.0
    config["zero_force_ds_cpu_optimizer"] = False
    with torch.device("meta"):
        largest = max(param.numel() for param in build(size).parameters())
    # Each of its buffers holds the largest parameter, and it needs one for each parameter that is read ahead or in use:
    # with its defaults it stops at 1.1B with "Not enough buffers".
    stored = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False, "buffer_size": largest + 4096}
    stored["buffer_count"] = STOCK_BUFFERS
    config["zero_optimization"] |= STOCK_LIVE
    config["zero_optimization"]["offload_param"] = stored

    def batches(step: int) -> torch.Tensor:
        return torch.randint(0, 1000, (1, options.tokens), generator=torch.Generator().manual_seed(step))

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    how: dict[str, Any] = {"probe": probe, "batches": batches, "make_optimizer": adam, "build": lambda: build(size)}
    train_stock(size, WARMUP + options.steps, config, **how)
    return {**found, "steps": peak(), "seconds": probe.medians()["total"]}


def limit_of(options: argparse.Namespace, system: str, size: str) -> int:
    """Return the memory that a system may take, in bytes; 0 where nothing bounds it."""
    if system not in ("gradients", "budgets"):
        return 0
    with torch.device("meta"):
        model = build(size)
    sizes = [sum(param.numel() for param in each.parameters(recurse=False)) for each in model.modules()]
    logits = options.tokens * 32_000 * 10  # in 16 bit, in fp32, and the fp32 gradient
    parameters = options.parameter_bytes if system == "budgets" else 2 * sum(sizes)
    return BASE + 2 * (2 + 2) * max(sizes) + logits + options.gradient_bytes + parameters


def measured(options: argparse.Namespace, system: str, size: str, clip: str, weights: Path | None) -> Figures | None:
    """Run the processes of one system, which loads the model from a folder if there is one; None if one fails."""
    names = ("tokens", "steps", "gradient_bytes", "parameter_bytes", "state_format", "durability", "overlap")
    given = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    given += ["--weights", str(weights)] if weights is not None else []
    found: Figures = {}
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="memory-") as folder:
        phases = ("train", "resume", "export") if system != "zero_infinity" else ("train",)
        for what in phases if weights is None else ("compare", *phases):
            told = f"{system}, {size}, clipping {clip}, {what}"
            child = ["--child", what, system, size, "--clip", clip, "--storage", folder]
            figures = measure(told, __file__, *child, *given)
            if figures is None:
                return None
            found |= figures
    limit = limit_of(options, system, size)
    return {**found, **({"limit": limit} if limit else {})}


def made_weights(sizes: list[str], folder: Path) -> dict[str, Path]:
    """Make the folder of weights of each size; return them by size."""
    from lightning_smartinfinity.planning.survey.models import find_source

    made = {size: make_folder(folder / size, find_source(size).config) for size in sizes}
    print(f"weights made with a peak of {peak() / 1e9:.2f} GB", file=sys.stderr)
    return made


def rows_of(options: argparse.Namespace, clip: str, made: dict[str, Path]) -> dict[str, Figures]:
    """Measure every system that does not fail, for one way to clip."""
    rows: dict[str, Figures] = {}
    for size, system in product(options.sizes, options.systems):
        figures = measured(options, system, size, clip, made.get(size))
        if figures is None:
            continue
        in_gb = {name: figures[name] / 1e9 for name in (*PHASES, "limit") if name in figures}
        rows[f"{size}, {system}"] = figures = {**figures, **in_gb}
        whole = rows.get(f"{size}, in_memory")
        if whole is not None:
            figures["against_memory"] = figures["seconds"] / whole["seconds"]
    return rows


def main() -> int:
    """Measure every system and print a table for each way to clip.

    Returns:
        Exit status: 1 if a system failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["124M"], help="numbers of parameters, such as 124M or 1.1B")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS[:3])
    parser.add_argument("--clip", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help=f"that are measured, after {WARMUP}")
    parser.add_argument("--gradient-bytes", type=int, default=256_000_000)
    parser.add_argument("--parameter-bytes", type=int, default=512_000_000)
    parser.add_argument("--state-format", default="fp32")
    parser.add_argument("--durability", choices=("none", "step", "power"), default="step")
    parser.add_argument("--overlap", default="forward")
    parser.add_argument("--storage", default=".", help="folder on the disk to measure")
    parser.add_argument("--from-pretrained", action="store_true", help="load the models from sharded safetensors")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.from_pretrained and "zero_infinity" in options.systems:
        parser.error("--from-pretrained is for the systems of this package, and zero_infinity is not one")
    os.environ["DS_ACCELERATOR"] = "cpu"
    if options.child:
        (what, system, size), folder = options.child, Path(options.storage)
        options.clip = options.clip[0]
        if system == "zero_infinity":
            report(stock(options, size, folder))
        elif what == "export":
            report(export(folder))
        else:
            report(fit(options, system, size, folder, what))
        return 0
    print(describe("torch", "deepspeed", "transformers"), flush=True)
    tables, failed = [], False
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="weights-") as folder:
        made = made_weights(options.sizes, Path(folder)) if options.from_pretrained else {}
        for clip in options.clip:
            rows = rows_of(options, clip, made)
            failed |= len(rows) < len(options.sizes) * len(options.systems)
            heading = f"bf16-true, {options.state_format} state, 1 x {options.tokens} tokens, clipping {clip}"
            print(f"\n{heading}\n\n{table(rows, COLUMNS, head='model, system')}", flush=True)
            tables.append({"clip": clip, "rows": rows})
    write_figures(options.json, benchmark="memory", machine=describe("torch", "deepspeed"), tables=tables)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
