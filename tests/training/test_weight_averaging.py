"""Lightning's callbacks that average weights train, validate and resume as in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

from tests.helpers.trainers import quiet_trainer
from tests.training.small import Small


class Averaged(Small):
    """Notes the losses of validation, too."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.seen.append(float(((self.net(batch) - 1) ** 2).mean()))


class BuiltLate(Averaged):
    """The same network, whose layers are divided over the processes as they are made."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Averaged().net


CALLBACKS: dict[str, Any] = {
    "mean": WeightAveraging,
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "EMA by epoch": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=-1, update_starting_at_epoch=0),
}


def final(module: Averaged) -> list[float]:
    """Return the losses and the sum of the squares of each final weight."""
    return [*module.seen, *(float(param.detach().square().sum()) for param in module.parameters())]


@pytest.mark.seam("average under a key", "WeightAveraging._average_model, on_save_checkpoint, on_load_checkpoint.")
@pytest.mark.parametrize(
    ("how", "precision", "rel"), [*((how, "32-true", 1e-5) for how in CALLBACKS), ("EMA", "bf16-mixed", 0.1)]
)
def test_an_average_trains_validates_and_resumes_as_in_memory(
    how: str, precision: str, rel: float, tmp_path: Path
) -> None:
    """Validation sees the average, training goes on with the weights, and a checkpoint brings both back."""
    results = {}
    for strategy in ("auto", None):
        root = tmp_path / str(strategy)
        settings: dict[str, Any] = {"precision": precision, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
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
    assert results[None] == pytest.approx(results["auto"], rel=rel)


@pytest.mark.parametrize("module", [Averaged, BuiltLate])
def test_validation_rounds_neither_the_weights_nor_their_average(module: type[Averaged], tmp_path: Path) -> None:
    """In 16 bit the average and the masters change places in fp32; a checkpoint has the average in fp32."""
    ends = []
    for name, batches in (("with", 1.0), ("without", 0), ("resumed", 1.0)):
        callback, trained = EMAWeightAveraging(decay=0.999), module()
        saving = Saving(tmp_path / "middle.ckpt")
        settings: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": batches, "max_epochs": 2}
        trainer = quiet_trainer(tmp_path / name, callbacks=[callback, saving], **settings)
        resumed: dict[str, Any] = {"ckpt_path": tmp_path / "middle.ckpt", "weights_only": False}
        trainer.fit(trained, **(resumed if name == "resumed" else {}))
        ends.append([param.detach().float() for param in callback._average_model.module.parameters()])
    assert any((value.bfloat16().float() != value).any() for value in ends[0])
    for values in ends[1:]:
        for value, expected in zip(values, ends[0], strict=True):
            assert torch.equal(value, expected)


class Saving(pl.Callback):
    """Saves a checkpoint after the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)
