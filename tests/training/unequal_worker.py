"""Two ranks of which one does something else: ``python -m tests.training.unequal_worker FOLDER SITUATION``.

SITUATION is ``loop`` or a key of :data:`SITUATIONS`. A rank that gets through prints ``done``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityFabricStrategy, SmartInfinityStrategy
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import await_that
from tests.training.small import Small

LIMIT = 2.0
"""Seconds that a rank may take to join the other one."""


def on_rank(rank: int, act: Callable[[Any], object]) -> Callable[[Any], None]:
    """Return a hook that does something on one rank alone."""

    def hook(module: Any) -> None:
        if module.global_rank == rank:
            act(module)

    return hook


def with_fewer_batches() -> Small:
    """Return a module that has two batches fewer on rank 1."""
    module = Small()
    module.train_dataloader = lambda: DataLoader(torch.ones(8 - 4 * module.global_rank, 8), batch_size=2)  # type: ignore[method-assign, arg-type]
    return module


class Generated(Small):
    """Rank 1 generates more tokens in validation."""

    def __init__(self) -> None:
        from transformers import LlamaForCausalLM

        from tests.helpers.model_folder import llama_config

        super().__init__()
        self.llama = LlamaForCausalLM(llama_config()).requires_grad_(False)

    def generate(self, rank: int) -> list[int]:
        """Return the tokens that a rank generates."""
        tokens = self.llama.generate(torch.arange(3, 7).unsqueeze(0), max_new_tokens=3 + 4 * rank, do_sample=False)
        return tokens[0].tolist()  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        print(f"rank {self.global_rank}: {self.generate(self.global_rank)}", flush=True)


def save_once(module: Any) -> None:
    if module.current_epoch == 0:
        module.trainer.save_checkpoint(Path(module.trainer.default_root_dir) / "all.ckpt")


SITUATIONS: dict[str, Callable[[], Small]] = {
    "fewer batches": with_fewer_batches,
    "forward at the end": lambda: Small(on_train_end=on_rank(1, lambda module: module.net(torch.ones(1, 8)))),
    "read on one": lambda: Small(on_train_batch_end=on_rank(1, lambda module: float(module.net[0].weight.norm()))),
    "written on one": lambda: Small(on_validation_end=on_rank(0, lambda module: module.net[0].bias.data.mul_(0.5))),
    "read differently": lambda: Small(
        on_train_batch_end=lambda module: float(module.net[2 * module.global_rank].weight.norm())  # type: ignore[attr-defined]
    ),
    "busy": lambda: Small(on_train_batch_end=on_rank(1, lambda module: time.sleep(3 * LIMIT))),
    "slow": lambda: Small(
        on_train_batch_end=on_rank(1, lambda module: time.sleep(LIMIT / 3)),
        on_train_epoch_end=save_once,
        on_save_checkpoint=on_rank(1, lambda module: time.sleep(3 * LIMIT)),
    ),
    "generated": Generated,
}


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
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    quiet_trainer(folder, strategy, devices=2, precision="32-true", **options).fit(SITUATIONS[situation]())
    if situation == "forward at the end":
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
