"""One process on a CPU has nothing to reduce, so its gradients bypass DeepSpeed's buckets without changing results."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from tests.helpers.hard_models import WIDTH, Case, HardModule
from tests.helpers.long_cases import long_but
from tests.training.model_cases import CHECKPOINTS, GRAPHS, STRUCTURES, UNUSED
from tests.training.model_runs import train_near_storage


class RandomShapes(HardModule):
    """A module with tensors of random shapes, used in random order, some of them twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        numels = [*torch.randint(1, 3_000, (12,), generator=generator).tolist(), 1, 2, 31, 33, 40_000]
        self.weights = nn.ParameterList(torch.randn(numel, generator=generator) / 10 for numel in numels)
        self.order = torch.randint(len(numels), (20,), generator=generator).tolist()

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        result = x.sum() / WIDTH
        for index in self.order:
            result = torch.tanh(result + (self.weights[index] * self.weights[index].cos()).mean())
        return result.square() + sum((weight.square().mean() for weight in self.weights), torch.zeros(()))


PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
CASES = {
    **{f"random shapes, {p}": Case(partial(RandomShapes, i), p, clip=0.5) for i, p in enumerate(PRECISIONS)},
    "random shapes, accumulating": Case(partial(RandomShapes, 7), "bf16-mixed", accumulate=3),
    "odd shapes": STRUCTURES["tensors of odd sizes and not contiguous"],
    "one weight in three places": STRUCTURES["one weight in three places"],
    "reentrant": dataclasses.replace(CHECKPOINTS["reentrant, bf16"], zero={}),
    "unused": UNUSED["by one micro-batch in bf16"],
    "retained": GRAPHS["one forward, two backwards"],
    "penalty": GRAPHS["a gradient penalty in bf16"],
}
USUAL = ("random shapes, 32-true", "random shapes, accumulating", "reentrant", "unused", "retained", "penalty")


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
