"""Models built in configure_model: ``python -m tests.training.configure_model_worker OUT PRECISION...``.

As a program it builds and trains one on two processes and leaves what each saw in ``OUT/<precision>-<rank>.pt``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.initialised import WIDTH, Initialised
from tests.helpers.trainers import quiet_trainer


class Built(pl.LightningModule):
    """Builds its model in configure_model; ``weights`` are those before the first step, ``losses`` one per step."""

    def __init__(self, build: Callable[[], nn.Module], loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.build, self.loss = build, loss
        self.weights: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        # Of each parameter, whether ZeRO-3 had it when configure_model ended.
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)  # what rank 0 draws is what counts
        self.model = self.build()

        self.partitioned = [hasattr(param, "ds_id") for param in self.model.parameters()]

    def on_train_start(self) -> None:
        import deepspeed

        for name, param in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters(param):
                self.weights[name] = param.detach().clone()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(inputs(), batch_size=2)  # type: ignore[arg-type]


def inputs() -> torch.Tensor:
    """Four samples."""
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss for :class:`Initialised`."""
    return model(batch.to(next(model.parameters()).dtype)).float().square().mean()


def fit(module: Built, root: Path, **settings: Any) -> Built:
    """One step."""
    trainer = quiet_trainer(root, **{"precision": "32-true", "max_steps": 1, **settings})
    trainer.fit(module)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module


def main() -> None:
    from lightning_smartinfinity.zero3.parameters import gather_on_use

    # Parameters are partitioned again as soon as others are touched.
    gather_on_use._GATHERED_BYTES = 0
    out = Path(sys.argv[1])
    for precision in sys.argv[2:]:
        module = fit(Built(Initialised, squares), out, devices=2, precision=precision)
        torch.save({"weights": module.weights, "losses": module.losses}, out / f"{precision}-{module.global_rank}.pt")


if __name__ == "__main__":
    main()
