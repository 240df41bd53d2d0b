"""Trains a stack of wide layers and prints its memory as JSON: ``... memory_worker FOLDER DEPTH training|saving``.

With ``saving`` the model exists before the fit, and it also saves a checkpoint, evaluates it and resumes from it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

WIDTH, STEPS = 2048, 2
TASKLET_BYTES, NUM_BUFFERS = 1024 * 1024, 4
M_MMAP_THRESHOLD = -3  # of mallopt()


def status(key: str) -> int:
    """Return a memory figure of this process from /proc, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def reset_peak() -> None:
    """Make VmHWM start again from the present resident size."""
    Path("/proc/self/clear_refs").write_text("5")


class Wide(pl.LightningModule):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.configure()

    def configure(self) -> None:
        # The model starts in 16 bit: an fp32 model would dominate the peak and hide the memory used later.
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(self.depth)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).float().square().mean()

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(8, WIDTH), batch_size=2)

    predict_dataloader = train_dataloader


class Configured(Wide):
    """Builds its layers in configure_model."""

    def configure(self) -> None:
        """Build nothing yet."""

    def configure_model(self) -> None:
        super().configure()


class Watch(pl.Callback):
    """A callback that records the peak resident size of training and the strategy's own accounting."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        import deepspeed  # noqa: F401  (its import is not what is measured)

        self.figures["before"] = status("VmRSS")
        reset_peak()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        strategy.drain()
        self.figures |= {
            "peak": status("VmHWM"),
            "host_bytes": strategy.host_bytes,
            "state_numel": strategy.state_numel,
            "traffic_steps": strategy.traffic().steps,
        }


def trainer_of(folder: str, *, steps: int, callbacks: Any = None) -> pl.Trainer:
    from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig

    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-true",
        strategy=SmartInfinityStrategy(
            folder,
            transfer=TransferConfig(tasklet_bytes=TASKLET_BYTES, num_buffers=NUM_BUFFERS),
            zero={"reduce_bucket_size": 4_500_000},
        ),
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def growth(action: Callable[[], object]) -> int:
    """Return how much the resident size grows at its peak during the action."""
    before = status("VmRSS")
    reset_peak()
    action()
    return status("VmHWM") - before


def watched_trainer(folder: str, figures: dict[str, Any], name: str) -> pl.Trainer:
    """Return a Trainer that records under ``name`` the memory that loading a checkpoint takes."""
    trainer = trainer_of(folder, steps=STEPS)
    strategy: Any = trainer.strategy
    load = strategy.load_checkpoint

    def watched(*args: Any, **kwargs: Any) -> Any:
        client_state: list[Any] = []
        figures[name] = growth(lambda: client_state.append(load(*args, **kwargs)))
        return client_state[0]

    strategy.load_checkpoint = watched
    return trainer


def main() -> None:
    # By default glibc learns from freed blocks and then keeps tensors of that size in its heaps, below memory still in
    # use. The amount depends on the order of threads: between nothing and 2 B per parameter were seen (DeepSpeed's copy
    # while it partitions), most on a busy machine, which hides the effect under test. With a fixed threshold each
    # tensor is mapped alone and returned at once.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    folder, depth, saves = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "saving"
    watch = Watch()
    trainer = trainer_of(folder, steps=STEPS, callbacks=[watch])
    trainer.fit(Wide(depth) if saves else Configured(depth))
    if saves:
        path = Path(folder) / "a.ckpt"
        watch.figures["saving"] = growth(lambda: trainer.save_checkpoint(path))
        evaluating = watched_trainer(folder, watch.figures, "evaluating")
        evaluating.predict(Wide(depth), ckpt_path=path)
        watched_trainer(folder, watch.figures, "loading").fit(Wide(depth), ckpt_path=path)
    sys.stdout.write(f"FIGURES {json.dumps(watch.figures)}\n")


if __name__ == "__main__":
    main()
