"""Lightning's callbacks that average weights train, validate and resume as in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

from tests.helpers.trainers import fit, quiet_trainer
from tests.training.actions import does
from tests.training.small import Small


class Averaged(Small):
    """Notes the losses of validation, too."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.seen.append(float(((self.net(batch) - 1) ** 2).mean()))


class BuiltLate(Averaged):
    """The same network, whose layers are divided over the processes as they are made."""

    def configure_model(self) -> None:
        self.net = Averaged().net


CALLBACKS: dict[str, Any] = {
    "mean": WeightAveraging,
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "EMA by epoch": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=-1, update_starting_at_epoch=0),
}


def saving(root: Path) -> pl.Callback:
    """Return a callback that saves ``middle.ckpt`` after the first epoch."""

    def save(trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(root / "middle.ckpt")

    return does(on_train_epoch_end=save)


def final(module: Averaged) -> list[float]:
    """Return the losses and the sum of the squares of each final weight."""
    return [*module.seen, *(float(param.detach().square().sum()) for param in module.parameters())]


@pytest.mark.seam("average under a key", "WeightAveraging._average_model, on_save_checkpoint, on_load_checkpoint.")
@pytest.mark.parametrize(
    ("how", "precision", "rel"),
    [
        ("mean", "32-true", 1e-5),
        ("EMA by epoch", "32-true", 1e-5),
        ("EMA", "bf16-mixed", 0.1),
    ],
)
def test_an_average_trains_validates_and_resumes_as_in_memory(
    how: str, precision: str, rel: float, tmp_path: Path
) -> None:
    """Validation sees the average, training goes on with the weights, and a checkpoint brings both back."""
    results = {}
    for strategy in ("auto", None):
        root, module, resumed = tmp_path / str(strategy), Averaged(), Averaged()
        settings: dict[str, Any] = {"precision": precision, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
        fit(module, root, strategy, callbacks=[CALLBACKS[how](), saving(root)], max_epochs=2, **settings)
        again = quiet_trainer(root, strategy, callbacks=[CALLBACKS[how]()], max_epochs=2, **settings)
        again.fit(resumed, ckpt_path=root / "middle.ckpt", weights_only=False)
        results[strategy] = [*final(module), *final(resumed)]
    assert results[None] == pytest.approx(results["auto"], rel=rel)


@pytest.mark.parametrize("module", [Averaged, BuiltLate])
def test_validation_rounds_neither_the_weights_nor_their_average(module: type[Averaged], tmp_path: Path) -> None:
    """In 16 bit the average and the masters change places in fp32; a checkpoint has the average in fp32."""
    ends = []
    for name, batches in (("with", 1.0), ("without", 0), ("resumed", 1.0)):
        callback = EMAWeightAveraging(decay=0.999)
        settings: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": batches, "max_epochs": 2}
        trainer = quiet_trainer(tmp_path / name, callbacks=[callback, saving(tmp_path / name)], **settings)
        resumed: dict[str, Any] = {"ckpt_path": tmp_path / "with/middle.ckpt", "weights_only": False}
        trainer.fit(module(), **(resumed if name == "resumed" else {}))
        ends.append([param.detach().float() for param in callback._average_model.module.parameters()])
    assert any((value.bfloat16().float() != value).any() for value in ends[0])
    for values in ends[1:]:
        torch.testing.assert_close(values, ends[0], rtol=0, atol=0)
