"""Measures memory while a model is exported: ``python -m tests.export.memory_worker FOLDER DEPTH``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from tests.training.memory_worker import Wide, growth, trainer_of


def main() -> None:
    folder, depth = sys.argv[1], int(sys.argv[2])
    root = Path(folder)
    trainer: Any = trainer_of(folder, steps=1)
    trainer.fit(Wide(depth))
    export_checkpoint_of = {"safetensors": ExportSettings(), "lightning": ExportSettings(to="lightning")}
    figures = {
        "live": growth(lambda: trainer.strategy.save_pretrained(root / "live")),
        "live_masters": growth(lambda: trainer.strategy.save_pretrained(root / "masters", dtype=torch.float32)),
    }
    trainer.save_checkpoint(root / "ckpt")
    trainer.strategy.close()
    for name, settings in export_checkpoint_of.items():
        figures[name] = growth(lambda s=settings, n=name: export_checkpoint(root / "ckpt", root / f"out-{n}", s))
    figures["parameters"] = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.lightning_module.parameters())
    sys.stdout.write(f"FIGURES {json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
