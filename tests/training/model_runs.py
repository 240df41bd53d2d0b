"""Trains hard modules with smart_infinity and compares them with plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.hard_modules import Case, HardModule, Trained, train_plainly
from tests.helpers.trainers import quiet_trainer

# Gather and release every parameter around its modules. DeepSpeed would keep parameters this small in memory.
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}


class Collect(pl.Callback):
    """A callback that collects masters and update counts by parameter name when training ends."""

    def __init__(self) -> None:
        self.masters: dict[str, torch.Tensor] = {}
        self.steps: dict[str, int] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer: Any = trainer.strategy.optimizers[0]
        names = (parameter.name for parameter in optimizer.partition.layout.parameters)
        counts = dict(zip(names, optimizer.update.drained_handler().steps, strict=True))
        for name, param in pl_module.named_parameters():
            if param.requires_grad:
                self.masters[name] = optimizer.get_full_hp_param(param).cpu().clone()
                self.steps[name] = int(counts.get(name, 0))


def trainer_for(case: Case, root: Path, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """Return a quiet Trainer with the case's settings."""
    options = {"loss_scale": 2.0**10} if case.precision.startswith("16") else {}
    strategy = SmartInfinityStrategy(
        root / "storage", transfer=TransferConfig(**case.transfer), zero={**NOTHING_PERSISTS, **case.zero}, **options
    )
    defaults: dict[str, Any] = {
        "precision": case.precision,
        "max_steps": case.steps,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip,
    }
    return quiet_trainer(root, strategy, callbacks=list(callbacks), **{**defaults, **settings})


def train_near_storage(
    case: Case, root: Path, *, module: HardModule | None = None, ckpt_path: str | None = None, **settings: Any
) -> Trained:
    """Train the case with smart_infinity.

    Args:
        case: The case to train.
        root: Folder for all files.
        module: Replaces the case's own module.
        ckpt_path: Checkpoint to resume from.
        **settings: Trainer settings that replace the case's.
    """
    module = module if module is not None else case.module()
    collect = Collect()
    trainer = trainer_for(case, root, collect, **settings)
    trainer.fit(module, ckpt_path=ckpt_path)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return Trained(module.seen, collect.masters, collect.steps)


def assert_trains_like_torch(case: Case, trained: Trained, *, world_size: int = 1) -> None:
    """Assert that losses, masters and update counts equal those of plain torch."""
    expected = train_plainly(case, world_size=world_size)
    torch.testing.assert_close(
        torch.tensor(trained.losses), torch.tensor(expected.losses), atol=case.masters / 4, rtol=case.masters / 4
    )
    assert trained.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(trained.masters[name], master, atol=case.masters, rtol=0, msg=name)
    # torch also counts updates of parameters without elements.
    held = {name for name, master in expected.masters.items() if master.numel()}
    assert {name: trained.steps[name] for name in held} == {name: expected.steps[name] for name in held}
    assert all(math.isfinite(loss) for loss in trained.losses) and len(set(trained.losses)) > 1


def on_each_rank(root: Path, *names: str) -> dict[str, Trained]:
    """Train named cases of model_cases.py one after the other on two ranks."""
    from tests.training.model_cases import CASES

    return {
        name: train_near_storage(CASES[name], root / f"case-{number}", devices=2) for number, name in enumerate(names)
    }
