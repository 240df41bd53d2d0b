"""Cost of collecting gradients in backward: this package against plain autograd, with the same GPT-2 in bf16.

Both models live in one process and take turns, since the speed of a shared machine drifts. Only backward is timed,
until every gradient is where the optimizer's step takes it from: in ``grad``, or in the gradient arena. Nothing is
updated, and gradients are dropped after each turn. Usage::

    python benchmarks/backward.py [--size 124m] [--storage .] [--runs 15] [--tokens 32] [--json figures.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comparison import write_figures
from gpt2 import GPT2, SIZES
from machine import describe
from training import quiet_trainer, tokens

WARMUP = 2
PLAIN, OURS = "plain autograd", "smart_infinity"


def measure(size: str, folder: str, *, runs: int, num_tokens: int) -> dict[str, list[float]]:
    """Return the seconds of every backward after the warm-up, by system."""
    import lightning.pytorch as pl

    from lightning_smartinfinity import SmartInfinityStrategy

    seconds: dict[str, list[float]] = {PLAIN: [], OURS: []}
    plain = GPT2(size).to(torch.bfloat16)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2(size)
            self.began = 0.0

        def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
            batch = tokens(index, size, (1, num_tokens))
            loss = plain(batch)
            begin = time.perf_counter()
            loss.backward()
            seconds[PLAIN].append(time.perf_counter() - begin)
            plain.zero_grad()
            return self.model(batch)

        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.began = time.perf_counter()

        def on_after_backward(self) -> None:
            seconds[OURS].append(time.perf_counter() - self.began)

        def optimizer_step(
            self, epoch: int, index: int, optimizer: Any, closure: Callable[[], Any] | None = None
        ) -> None:
            assert closure is not None
            closure()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(WARMUP + runs, 1), batch_size=1)

    strategy = SmartInfinityStrategy(folder, overlap="none")
    quiet_trainer(folder, strategy, precision="bf16-true", max_epochs=1).fit(Module())
    return {name: times[WARMUP:] for name, times in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--storage", default=".", help="the state is made there, and removed again")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    machine = describe("torch", "deepspeed", "lightning")
    print(machine)
    with tempfile.TemporaryDirectory(dir=arguments.storage, prefix="backward-") as folder:
        figures = measure(arguments.size, folder, runs=arguments.runs, num_tokens=arguments.tokens)
    print("| backward | median s | least s | over plain, median s |")
    print("|---|---|---|---|")
    for name, times in figures.items():
        over = statistics.median(time - plainly for time, plainly in zip(times, figures[PLAIN], strict=True))
        print(f"| {name} | {statistics.median(times):.3f} | {min(times):.3f} | {over:.3f} |")
    write_figures(arguments.json, machine=machine, seconds=figures)


if __name__ == "__main__":
    main()
