"""Trains and counts the updates that began within backward: ``python -m tests.training.guesses_worker RUNS.json``."""

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
            "validated": module.validated,
            **recorder.extra,
            "outputs": type(optimizer.partition.outputs(by_cuda=True)).__name__,
            "adopted": optimizer.speculation.num_adopted,
            "binding": optimizer.speculation.num_binding,
            "discarded": optimizer.speculation.num_discarded,
        }
        out = Path(run.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"losses-{trainer.global_rank}.json").write_text(json.dumps(figures))
        if trainer.global_rank == 0:
            torch.save(recorder.masters, out / "masters.pt")
        trainer.strategy.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
