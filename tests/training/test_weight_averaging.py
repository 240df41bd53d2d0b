"""Lightning's callbacks that average weights train, validate and resume as in memory, with parameters in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.trainers import quiet_trainer


class Averaged(pl.LightningModule):
    """A small network that notes its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = ((self.net(batch) - 1) ** 2).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.losses.append(float(((self.net(batch) - 1) ** 2).mean()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


CALLBACKS: dict[str, Any] = {
    "mean": WeightAveraging,
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "EMA by epoch": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=-1, update_starting_at_epoch=0),
}


def final(module: Averaged) -> list[float]:
    """Return the losses and the sum of the squares of each final weight."""
    return [*module.losses, *(float(param.detach().square().sum()) for param in module.parameters())]


@pytest.mark.parametrize("how", CALLBACKS)
def test_an_average_trains_validates_and_resumes_as_in_memory(how: str, tmp_path: Path) -> None:
    """Validation sees the average, training goes on with the weights, and a checkpoint brings both back."""
    results = {}
    for strategy in ("auto", None):
        root = tmp_path / str(strategy)
        settings: dict[str, Any] = {"precision": "32-true", "num_sanity_val_steps": 0, "use_distributed_sampler": False}
        first, module = CALLBACKS[how](), Averaged()
        trainer = quiet_trainer(root, strategy, callbacks=[first], max_epochs=2, **settings)
        trainer.fit(module)
        trained = final(module)
        saving = Saving(root / "middle.ckpt")
        quiet_trainer(root, strategy, callbacks=[CALLBACKS[how](), saving], max_epochs=2, **settings).fit(Averaged())
        resumed = Averaged()
        again = quiet_trainer(root, strategy, callbacks=[CALLBACKS[how]()], max_epochs=2, **settings)
        again.fit(resumed, ckpt_path=root / "middle.ckpt", weights_only=False)
        results[strategy] = [*trained, *final(resumed)]
    assert results[None] == pytest.approx(results["auto"], rel=1e-5)


class Saving(pl.Callback):
    """Saves a checkpoint after the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)
