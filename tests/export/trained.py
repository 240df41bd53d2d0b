"""Trains a tiny model for two steps, and records its weights by DeepSpeed's own means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.export.models import LitModel, logits
from tests.helpers.trainers import quiet_trainer

__all__ = ["Trained", "files_of", "train"]


@dataclass(frozen=True)
class Trained:
    """A training that is over.

    Args:
        root: Its folder, with the checkpoint ``ckpt``, and what ``save_pretrained`` wrote as ``live``, in fp32 as
            ``live32``.
        module: Its module.
        weights: The parameters as they are trained, whole, under all of their names.
        masters: Their masters.
        logits: What the model makes of some tokens in evaluation.
    """

    root: Path
    module: LitModel
    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    logits: torch.Tensor

    @property
    def checkpoint(self) -> Path:
        """The checkpoint."""
        return self.root / "ckpt"


def train(root: Path, module: LitModel, strategy: Any = None, **settings: Any) -> Trained:
    """Train a module, and save it in every way."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    trainer = quiet_trainer(
        root, strategy, **{"precision": "bf16-mixed", "max_steps": 2, "limit_val_batches": 0, **settings}
    )
    trainer.fit(module)
    trainer.strategy.save_pretrained(root / "live")  # type: ignore[attr-defined]
    trainer.strategy.save_pretrained(root / "live32", dtype=torch.float32)  # type: ignore[attr-defined]
    trainer.save_checkpoint(root / "ckpt")
    model: Any = module.inner.model
    params = dict(model.named_parameters(remove_duplicate=False))
    masters = {name: safe_get_full_fp32_param(param) for name, param in params.items() if param.requires_grad}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: param.detach().clone() for name, param in params.items()}
        result = logits(model)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return Trained(root, module, weights, masters, result)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
