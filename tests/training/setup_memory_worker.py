"""Fits a stack of layers and prints the peak memory of its set-up: ``... setup_memory_worker FOLDER WHERE``.

WHERE is ``init`` or ``configure_model``: where the module builds its layers. All figures are bytes above what the
imports take.
"""

from __future__ import annotations

import json
import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.memory_worker import reset_peak, status

# Each weight takes 4 MB in fp32, so glibc would keep it in its heaps when it is freed.
WIDTH, DEPTH = 1024, 64


class Stack(pl.LightningModule):
    """Layers that torch initialises in the precision of the place where they are built."""

    def __init__(self, where: str, base: int) -> None:
        super().__init__()
        self.where, self.base = where, base
        self.figures: dict[str, int] = {}
        if where == "init":
            self.layers = build()
            self.figures["built"] = status("VmRSS") - base

    def configure_model(self) -> None:
        if self.where == "configure_model":
            reset_peak()
            self.layers = build()
            self.figures["built"] = status("VmHWM") - self.base
            reset_peak()

    def on_train_start(self) -> None:
        self.figures["set_up"] = status("VmHWM") - self.base
        self.figures["after"] = status("VmRSS") - self.base
        reset_peak()

    def on_train_end(self) -> None:
        self.figures["steps"] = status("VmHWM") - self.base

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch.to(self.dtype)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.randn(8, WIDTH), batch_size=2)  # type: ignore[arg-type]


def build() -> nn.Sequential:
    """Build the layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def main() -> None:
    folder, where = sys.argv[1:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig

    base = status("VmRSS")
    module = Stack(where, base)
    reset_peak()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-true",
        strategy=SmartInfinityStrategy(
            folder,
            transfer=TransferConfig(tasklet_bytes=1024 * 1024, num_buffers=8),
            zero={"reduce_bucket_size": 4_500_000},
        ),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module)
    figures = {**module.figures, "numel": sum(param.ds_numel for param in module.parameters())}  # type: ignore[attr-defined]
    sys.stdout.write(f"FIGURES {json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
