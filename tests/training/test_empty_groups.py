"""Empty parameter groups, such as "no decay" where only adapters are trained, train and resume as torch takes them.

The cases of tests/training/model_cases.py train with them on one process and on two.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from lightning_smartinfinity import CheckpointError
from tests.helpers.hard_modules import grouped
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import convert_by_command


class Ordered(LitTiny):
    """A module with its groups in a given order (see :func:`grouped`), and a scheduler with a rate for each."""

    def __init__(self, order: str = "0w0b") -> None:
        super().__init__(Recipe(depth=1))
        self.order = order

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(grouped(list(self.named_parameters()), self.order), eps=1e-4)
        rates: list[Any] = [partial(pow, 0.5 + number / 8) for number in range(len(self.order))]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rates), "interval": "step"}]


def fitted(root: Path, module: Ordered, *, steps: int, ckpt_path: Path | None = None) -> pl.Trainer:
    trainer = quiet_trainer(root, max_steps=steps, precision="32-true")
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint after two steps of an optimizer whose first and third group are empty."""
    root = tmp_path_factory.mktemp("saved")
    trainer = fitted(root, Ordered(), steps=2)
    trainer.save_checkpoint(root / "two.ckpt")
    trainer.strategy.close()  # type: ignore[attr-defined]
    return root / "two.ckpt"


@pytest.mark.parametrize("converted_by", [None, convert_by_command])
def test_a_fit_with_empty_groups_resumes_exactly(converted_by: Any, saved: Path, tmp_path: Path) -> None:
    """Losses, rates and moments go on as those of a fit that never stopped, also from universal checkpoints."""
    if converted_by is not None:
        copied = shutil.copytree(saved, tmp_path / "two.ckpt")
        saved = converted_by(copied)
    straight, resumed = Ordered(), Ordered()
    trainers = [
        fitted(tmp_path / "straight", straight, steps=4),
        fitted(tmp_path / "resumed", resumed, steps=4, ckpt_path=saved),
    ]
    assert resumed.losses == straight.losses[2:]
    rates = [[group["lr"] for group in trainer.optimizers[0].param_groups] for trainer in trainers]
    expected = [rate * (0.5 + number / 8) ** 4 for number, rate in enumerate([1.0, 1e-2, 1.0, 5e-3])]
    assert rates[0] == rates[1] == pytest.approx(expected)
    for name in ("weight", "bias"):
        moments = [
            safe_get_full_optimizer_state(getattr(module.model.side, name), "exp_avg") for module in (straight, resumed)
        ]
        assert torch.equal(*moments) and moments[0].any()


@pytest.mark.parametrize("order", ["w00b", "0wb", "0w0b0"])
def test_a_checkpoint_with_other_empty_groups_is_refused(order: str, saved: Path, tmp_path: Path) -> None:
    """The settings of an empty group would otherwise go to parameters, or the other way around."""
    with pytest.raises(CheckpointError, match="arameter group"):
        fitted(tmp_path, Ordered(order), steps=3, ckpt_path=saved)
