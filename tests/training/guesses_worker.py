"""Trains and counts the updates that began within backward: ``python -m tests.training.guesses_worker RUNS.json``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from tests.training.worker import main


def guesses(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the figures of a training, and end it."""
    optimizer: Any = trainer.strategy.optimizers[0]
    figures = {
        "outputs": type(optimizer.partition.outputs(by_cuda=True)).__name__,
        "adopted": optimizer.speculation.num_adopted,
        "binding": optimizer.speculation.num_binding,
        "discarded": optimizer.speculation.num_discarded,
    }
    trainer.strategy.close()  # type: ignore[attr-defined]
    return figures


if __name__ == "__main__":
    main(guesses)
