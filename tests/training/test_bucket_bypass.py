"""One process on a CPU has nothing to reduce, so its gradients bypass DeepSpeed's buckets without changing results."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from tests.helpers.hard_models import WIDTH, Case, HardModule
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny
from tests.helpers.trainers import quiet_trainer
from tests.training.model_cases import CHECKPOINTS, GRAPHS, STRUCTURES, UNUSED
from tests.training.model_runs import train_near_storage
from tests.training.test_overlap import BF16


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
USUAL = ("random shapes, 32-true", "random shapes, accumulating", "reentrant", "unused", "penalty")


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


class Manual(LitTiny):
    """A module with two manual backward passes per step."""

    automatic_optimization = False

    def first(self, loss: torch.Tensor) -> None:
        self.manual_backward(loss)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.first(self.model(batch) / 2)
        self.manual_backward(self.model(batch.flip(0)) / 2)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(float(self.model(batch).detach()))


class FirstDirect(Manual):
    """A module whose first backward pass bypasses the engine."""

    def first(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("build", long_but([FirstDirect], [Manual, FirstDirect]))
def test_manual_optimization_gives_the_same_bits(
    build: type[Manual], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later backward passes add to the first one's gradients, and clipping scales their sum."""
    losses = []
    for bypasses in (True, False):
        monkeypatch.setattr(GradientPath, "bypasses_buckets", bypasses)
        strategy = SmartInfinityStrategy(tmp_path / str(bypasses))
        module = build(BF16)
        quiet_trainer(tmp_path, strategy, precision=BF16.precision, max_steps=4).fit(module)
        strategy.close()
        losses.append(module.losses)
    assert losses[0] == losses[1] and len(set(losses[0])) == 4


def test_overlap_learns_of_gradients_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in a model smaller than a bucket every gradient is reported alone, and the speculative updates are kept."""
    told: list[int] = []
    arrived = Speculation.arrived
    monkeypatch.setattr(Speculation, "arrived", lambda self, params: (told.append(len(params)), arrived(self, params)))
    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap="backward")
    module = LitTiny(BF16)
    quiet_trainer(tmp_path, strategy, precision=BF16.precision, max_steps=2).fit(module)
    assert told == [1] * (2 * len(list(module.parameters())))
    assert strategy.optimizers[0].speculation.num_adopted == 2
    strategy.close()


def test_a_bucket_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    """No bucket is allocated."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", zero={"reduce_bucket_size": 10**16})
    module = LitTiny(BF16)
    quiet_trainer(tmp_path, strategy, precision=BF16.precision, max_steps=1).fit(module)
    assert len(module.losses) == 1
    assert all(bucket.buffer is None for bucket in strategy.optimizers[0].ipg_buckets.values())
    strategy.close()
