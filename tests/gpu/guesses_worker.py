"""Trains and counts the updates that began within backward: ``python -m tests.gpu.guesses_worker RUNS.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.training.worker import parse, train


def main() -> None:
    for raw in json.loads(Path(sys.argv[1]).read_text()):
        run = parse(raw)
        module, trainer, recorder = train(run)
        optimizer: Any = trainer.strategy.optimizers[0]
        figures = {
            "losses": module.losses,
            "outputs": type(optimizer._outputs()).__name__,
            "adopted": optimizer.speculation.num_adopted,
            "discarded": optimizer.speculation.num_discarded,
        }
        Path(run.out, "losses-0.json").write_text(json.dumps(figures))
        torch.save(recorder.masters, Path(run.out, "masters.pt"))


if __name__ == "__main__":
    main()
