"""Compressed gradients in a user's own Fabric loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_set_full_grad
from lightning.fabric import Fabric

from lightning_smartinfinity import SmartInfinityFabricStrategy, TopK, TransferConfig
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath

pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")


class Training:
    """One step of a model of two layers, on one process.

    Args:
        root: Folder for the state.
        **settings: Settings of the strategy.
    """

    def __init__(self, root: Path, **settings: Any) -> None:
        transfer = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3)
        strategy = SmartInfinityFabricStrategy(root / "state", compression=TopK(0.05), transfer=transfer, **settings)
        self.fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.Tanh(), torch.nn.Linear(200, 8))
        self.model, optimizer = self.fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        self.fabric.backward(self.loss(self.model))
        optimizer.step()
        optimizer.zero_grad()

    def loss(self, model: Any) -> torch.Tensor:
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        return model(batch).square().mean()  # type: ignore[no-any-return]

    @property
    def residual(self) -> torch.Tensor:
        held: Any = self.fabric.strategy
        held.drain()
        return held._training_optimizer.rank_state.compressed.residual.clone()  # type: ignore[no-any-return]


def set_gradient(training: Training) -> None:
    safe_set_full_grad(training.model.module[0].weight, torch.ones(200, 64))


def go_backward_elsewhere(training: Training) -> None:
    training.loss(training.model.module).backward()  # type: ignore[no-untyped-call]  # bypasses the engine: the step would refuse it


@pytest.mark.parametrize("write", [set_gradient, go_backward_elsewhere])
def test_gradients_that_come_beside_the_update(
    write: Callable[[Training], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual comes from the gradients of the step in flight, not from those that replace them."""
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)  # as on a GPU, or with several processes
    expected = Training(tmp_path / "expected", overlap="none")
    training = Training(tmp_path / "overlapped", overlap="forward", zero={"reduce_bucket_size": 13_000})
    write(training)
    assert torch.equal(training.residual, expected.residual) and expected.residual.any()
