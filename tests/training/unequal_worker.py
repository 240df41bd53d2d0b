"""Two ranks of which one does something else: ``python -m tests.training.unequal_worker FOLDER SITUATION``.

SITUATION is ``loop``, a key of :data:`HOOKS`, or the name of a class below. A rank that gets through prints ``done``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_smartinfinity import SmartInfinityFabricStrategy, SmartInfinityStrategy
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import await_that

LIMIT = 2.0
"""Seconds that a rank may take to join the other one."""

SEED = 7


class Numbers(IterableDataset[torch.Tensor]):
    """A stream of eight rows on rank 0, and of fewer on rank 1."""

    def __init__(self, fewer: int) -> None:
        self.fewer = fewer

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = torch.distributed.get_rank()
        return iter(torch.randn(8 - self.fewer * rank, 8, generator=torch.Generator().manual_seed(SEED)))


class Equal(pl.LightningModule):
    """All ranks do the same."""

    fewer = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.net = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 1))

    @property
    def is_alone(self) -> bool:
        return self.global_rank == 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(self.fewer), batch_size=2)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(0), batch_size=2)


class TrainingStreams(Equal):
    """Rank 1 has two batches fewer in an epoch."""

    fewer = 4


class ExtraBackward(Equal):
    """Rank 1 runs a backward more in a step."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2 if self.is_alone and batch_idx == 1 else 1):
            self.manual_backward(self.net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


class ReadDifferently(Equal):
    """Each rank reads another parameter."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[2 * self.global_rank].weight.norm()


class SlowSave(Equal):
    """Rank 1 takes longer than the limit within a save."""

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "all.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.is_alone:
            time.sleep(3 * LIMIT)


class Generated(Equal):
    """Rank 1 generates more tokens in validation."""

    synced: bool | None = None

    def __init__(self) -> None:
        from transformers import LlamaForCausalLM

        from tests.helpers.model_folder import llama_config

        super().__init__()
        self.llama = LlamaForCausalLM(llama_config()).requires_grad_(False)

    def generate(self, rank: int) -> list[int]:
        """Return the tokens that a rank generates."""
        start, several = torch.arange(3, 7).unsqueeze(0), 3 + 4 * rank
        tokens = self.llama.generate(start, max_new_tokens=several, do_sample=False, synced_gpus=self.synced)
        return tokens[0].tolist()  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        print(f"rank {self.global_rank}: {self.generate(self.global_rank)}", flush=True)


class GeneratedApart(Generated):
    """Rank 1 generates more tokens, and transformers was told not to wait for it."""

    synced = False


HOOKS: dict[str, tuple[str, int, Callable[[Any], object]]] = {
    "ReadOnOne": ("on_train_batch_end", 1, lambda module: module.net[0].weight.norm()),
    "WrittenOnOne": ("on_validation_end", 0, lambda module: module.net[0].bias.data.mul_(0.5)),
    "SavedOnOne": (
        "on_train_epoch_end",
        1,
        lambda module: module.trainer.save_checkpoint(f"{module.trainer.default_root_dir}/alone.ckpt"),
    ),
    "Busy": ("on_train_batch_end", 1, lambda module: time.sleep(3 * LIMIT)),
    "ForwardAtEnd": ("on_train_end", 1, lambda module: module.net(torch.ones(1, 8))),
    "Slow": ("on_train_batch_end", 1, lambda module: time.sleep(LIMIT / 3)),
}
"""Situations of one rank alone: a hook, the rank, and what it does there."""


def module_of(situation: str) -> Equal:
    """Return the module of a situation."""
    if situation not in HOOKS:
        module: Equal = globals()[situation]()
        return module
    module, (hook, rank, act) = Equal(), HOOKS[situation]

    def on_one(*_: Any) -> None:
        if module.global_rank == rank:
            act(module)

    setattr(module, hook, on_one)
    return module


def loop(folder: Path) -> None:
    """Train in a loop of Fabric's, with a batch more on rank 1."""
    strategy = SmartInfinityFabricStrategy(folder / "storage", collective_timeout=LIMIT)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = nn.Linear(8, 1)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    for _ in range(3 + fabric.global_rank):
        fabric.backward(model(torch.ones(2, 8)).mean(), model=model)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(4 * LIMIT)


def fit(folder: Path, situation: str) -> None:
    """Fit for two epochs; parameters are gathered for each use."""
    keys = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    zero = {f"stage3_{key}": 0 for key in keys}
    strategy = SmartInfinityStrategy(folder / "storage", collective_timeout=LIMIT, zero=zero)
    trainer = quiet_trainer(folder, strategy, devices=2, max_epochs=2, num_sanity_val_steps=0, precision="32-true")
    trainer.fit(module_of(situation))
    if situation == "ForwardAtEnd":
        time.sleep(4 * LIMIT)


def main() -> None:
    folder, situation = Path(sys.argv[1]), sys.argv[2]
    try:
        if situation == "loop":
            loop(folder)
        else:
            fit(folder, situation)
    finally:  # the first rank that fails ends the others
        (folder / f"over-{os.environ['RANK']}").touch()
        await_that(lambda: all((folder / f"over-{rank}").exists() for rank in (0, 1)))
    print("done", flush=True)


if __name__ == "__main__":
    main()
