"""``TransferConfig(compute_threads=...)`` sets the number of updating threads and changes no bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.models import LitTiny
from tests.helpers.trainers import quiet_trainer
from tests.training.test_overlap import BF16

# Clipping and a format with stochastic rounding: both could depend on which thread updates what.
RECIPE = dataclasses.replace(BF16, groups=True, clip=0.3)


def num_updating() -> int:
    """Return how many threads of this process update."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name == "smart-inf-cpu" for name in names)


class Count(pl.Callback):
    """A callback that counts updating threads when training starts."""

    counted = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.counted = num_updating()


def train(root: Path, compute_threads: int) -> tuple[int, list[float], list[torch.Tensor]]:
    """Return the number of updating threads, the losses, and the masters."""
    transfer = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=6, compute_threads=compute_threads)
    strategy = SmartInfinityStrategy(root, overlap="backward", state_format="int8", transfer=transfer)
    count, module, before = Count(), LitTiny(RECIPE), num_updating()
    trainer = quiet_trainer(
        root, strategy, callbacks=[count], max_steps=RECIPE.max_steps, gradient_clip_val=RECIPE.clip
    )
    trainer.fit(module)
    masters = [strategy.optimizers[0].get_full_hp_param(param).clone() for param in module.model.parameters()]
    strategy.close()
    return count.counted - before, module.losses, masters


def test_the_same_bits_from_one_thread_and_from_three(tmp_path: Path) -> None:
    """One and three threads give the same losses and masters, and that many threads run."""
    one, losses, masters = train(tmp_path / "one", 1)
    three, losses_of_three, masters_of_three = train(tmp_path / "three", 3)
    assert (one, three) == (1, 3)
    assert losses_of_three == losses
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(masters_of_three, masters, strict=True))
