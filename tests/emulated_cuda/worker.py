"""Trains on the emulated device: ``python -m tests.emulated_cuda.worker FUNCTION ARGUMENTS``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

from lightning_smartinfinity.pipeline import handler as handler_module
from lightning_smartinfinity.zero3.optimizer import overlap_choice
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from tests.native.fake_cuda import FakeCuda
from tests.pipeline.wandering import Wandering
from tests.training import test_overlap_programs as programs
from tests.training.worker import parse, train


def train_programs(folder: str, first: str, stop: str) -> None:
    """Train random programs, and write what each of them leaves to ``FOLDER/<seed>.pt``."""
    overlap_choice._WARM_UP, overlap_choice._MEASURED = 0, 1
    handler_module.Balance = Wandering  # type: ignore[misc]
    for seed in range(int(first), int(stop)):
        drawn = programs.program(seed)
        GradientPath.bypasses_buckets = drawn.bypasses_buckets  # type: ignore[assignment, method-assign]
        left = programs.train(drawn, Path(folder, f"{seed}"), programs.Faulty(seed=seed), accelerator="cuda")
        tensors = {name: tensor.cpu() for name, tensor in left.tensors.items()}
        torch.save(dataclasses.asdict(dataclasses.replace(left, tensors=tensors)), Path(folder, f"{seed}.pt"))


def fail(runs: str, skipped: str) -> None:
    """Train until a copy fails. The process ends by the error of the driver, or by torch's if torch noticed."""
    FakeCuda(Path(os.environ["SMART_INFINITY_EMULATED_CUDA"])).fail_copy(skipped=int(skipped))
    (raw,) = json.loads(Path(runs).read_text())
    train(parse(raw))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
