"""Makes Trainers that print and write nothing but what a test asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig


def quiet_trainer(root: Path, strategy: Any = None, **settings: Any) -> pl.Trainer:
    """Return a Trainer of one CPU process and three steps in bf16, which prints and logs nothing.

    Args:
        root: Checkpoints and logs go there; storage into ``root / "storage"``.
        strategy: Default: our strategy.
        **settings: Settings of the Trainer, and ``overlap`` and ``transfer`` of our strategy, the latter those of its
            TransferConfig.
    """
    if strategy is None:
        transfer = TransferConfig(**settings.pop("transfer", {}))
        strategy = SmartInfinityStrategy(root / "storage", overlap=settings.pop("overlap", "auto"), transfer=transfer)
    return pl.Trainer(
        strategy=strategy,
        default_root_dir=root,
        **{
            "accelerator": "cpu",
            "devices": 1,
            "precision": "bf16-mixed",
            "max_steps": -1 if "max_epochs" in settings else 3,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        },
    )


def fit(module: pl.LightningModule, root: Path, strategy: Any = None, **settings: Any) -> pl.Trainer:
    """Fit by a :func:`quiet_trainer` and return it."""
    trainer = quiet_trainer(root, strategy, **settings)
    trainer.fit(module)
    return trainer
