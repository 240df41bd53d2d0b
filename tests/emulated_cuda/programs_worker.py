"""Trains random programs on the emulated device: ``python -m tests.emulated_cuda.programs_worker FOLDER FIRST NUMBER``.

What each of them leaves is written to ``FOLDER/<seed>.pt``.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

from lightning_smartinfinity.pipeline import handler as handler_module
from lightning_smartinfinity.zero3.optimizer import overlap_choice
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from tests.pipeline.wandering import Wandering
from tests.training import test_overlap_programs as programs


def main() -> None:
    folder, first, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    overlap_choice._WARM_UP, overlap_choice._MEASURED = 0, 1
    handler_module.Balance = Wandering  # type: ignore[misc]
    for seed in range(first, first + number):
        drawn = programs.program(seed)
        GradientPath.bypasses_buckets = drawn.bypasses_buckets  # type: ignore[assignment, method-assign]
        left = programs.train(drawn, folder / f"{seed}", programs.Faulty(seed=seed), accelerator="cuda")
        tensors = {name: tensor.cpu() for name, tensor in left.tensors.items()}
        torch.save(dataclasses.asdict(dataclasses.replace(left, tensors=tensors)), folder / f"{seed}.pt")


if __name__ == "__main__":
    main()
