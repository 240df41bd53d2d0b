"""One process on a CPU has nothing to reduce, so its gradients bypass DeepSpeed's buckets without changing results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from tests.helpers.long_cases import long_but
from tests.training.model_cases import CHECKPOINTS, GRAPHS, STRUCTURES, UNUSED
from tests.training.model_runs import train_near_storage

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
ODD = STRUCTURES["tensors of odd sizes and not contiguous"]
CASES = {
    **{f"odd shapes, {precision}": dataclasses.replace(ODD, precision=precision, clip=0.5) for precision in PRECISIONS},
    "odd shapes, accumulating": dataclasses.replace(ODD, precision="bf16-mixed", accumulate=3),
    "one weight in three places": STRUCTURES["one weight in three places"],
    "reentrant": dataclasses.replace(CHECKPOINTS["reentrant, bf16"], zero={}),
    "unused": UNUSED["by one micro-batch in bf16"],
    "retained": GRAPHS["one forward, two backwards"],
    "penalty": GRAPHS["a gradient penalty in bf16"],
}
USUAL = ("odd shapes, 32-true", "odd shapes, accumulating", "reentrant", "unused", "retained", "penalty")


@pytest.mark.parametrize("name", long_but(USUAL, CASES))
def test_same_bits_with_and_without_buckets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, masters and update counts are the same bit for bit."""
    straight = train_near_storage(CASES[name], tmp_path / "straight")
    reduced: list[int] = []
    reduce = StorageOptimizer.partition_grads
    monkeypatch.setattr(
        StorageOptimizer, "partition_grads", lambda *args: (reduced.append(len(args[1])), reduce(*args))[1]
    )
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)
    bucketed = train_near_storage(CASES[name], tmp_path / "bucketed")
    assert straight.losses == bucketed.losses and straight.steps == bucketed.steps
    assert max(reduced) > 1, "no gradients were reduced together"
    for master, expected in zip(straight.masters.values(), bucketed.masters.values(), strict=True):
        assert torch.equal(master, expected)
