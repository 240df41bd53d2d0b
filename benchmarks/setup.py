"""Peak memory of each phase of a training: imports, building, set-up with the first state, steps, saving.

    python benchmarks/setup.py --numel 571000000 --where configure_model
    python benchmarks/setup.py --numel 20000000 --layers 20000

The model is a chain of layers of 1 to 64 MB, as those of a language model, in bf16. Each peak is the resident set's
high-water mark (VmHWM), which is reset before the phase, above what the process takes after its imports. The storage
folder needs 24 bytes per parameter, and 14 more for the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from machine import describe
from peak_memory import resident, restart_peak
from torch import nn
from torch.utils.data import DataLoader
from training import quiet_trainer

STEPS = 4


class Phases:
    """Records the peak and the duration of consecutive phases."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, float]] = []
        self._begin = time.perf_counter()

    def end(self, phase: str) -> None:
        """End a phase and begin the next one."""
        now = time.perf_counter()
        self.rows.append((phase, resident("VmHWM"), now - self._begin))
        restart_peak()
        self._begin = now


class Chain(pl.LightningModule):
    """A chain of square layers, built where the user says.

    Args:
        width: Number of features.
        depth: Number of layers.
        where: ``init`` or ``configure_model``.
        phases: Is told when a phase ends.
    """

    def __init__(self, width: int, depth: int, where: str, phases: Phases) -> None:
        super().__init__()
        self.shape, self.where, self.phases = (width, depth), where, phases
        if where == "init":
            self._build()

    def _build(self) -> None:
        width, depth = self.shape
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        self.phases.end("build")

    def configure_model(self) -> None:
        if self.where == "configure_model":
            self._build()

    def on_train_start(self) -> None:
        self.phases.end("set-up, first state")

    def on_train_batch_end(self, *_: object) -> None:
        self.phases.end(f"step {self.global_step}")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch.to(self.dtype)).float().square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.randn(STEPS, self.shape[0]), batch_size=1)  # type: ignore[arg-type]


def shape_of(numel: int, layers: int | None) -> tuple[int, int]:
    """Return width and depth of a chain with about this number of parameters."""
    if layers is not None:
        return max(1, round((numel / layers) ** 0.5)), layers
    width = 2048 if numel > 100_000_000 else 1024 if numel > 10_000_000 else 128
    return width, max(1, round(numel / width**2))


def main() -> int:
    """Measure the phases and print a table below the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=571_000_000, help="number of parameters")
    parser.add_argument("--layers", type=int, help="number of layers, each with one tensor (default: few large ones)")
    parser.add_argument("--where", choices=("init", "configure_model"), default="configure_model")
    parser.add_argument("--precision", choices=("bf16-true", "bf16-mixed"), default="bf16-true")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    from lightning_smartinfinity import SmartInfinityStrategy
    from lightning_smartinfinity.zero3 import engine  # noqa: F401  (its import is a phase of its own)

    phases, (width, depth) = Phases(), shape_of(options.numel, options.layers)
    base = resident("VmRSS")
    phases.end("import")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        strategy = SmartInfinityStrategy(folder)
        trainer = quiet_trainer(folder, strategy, precision=options.precision, max_steps=STEPS)
        trainer.fit(Chain(width, depth, options.where, phases))
        trainer.save_checkpoint(Path(folder) / "a.ckpt")
        phases.end("save")
        numel = strategy.state_numel
        strategy.close()
    print(describe("torch", "deepspeed"))
    print(f"{numel / 1e6:.0f}M parameters in {options.where}, {options.precision}\n")
    print("| phase | peak above imports, GB | bytes per parameter | seconds |\n|---|---|---|---|")
    for phase, peak, seconds in phases.rows:
        above = max(0, peak - base)
        print(f"| {phase} | {above / 1e9:.2f} | {above / numel:.2f} | {seconds:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
