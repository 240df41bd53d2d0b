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

SMALL_RING = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3)


def batch_of(number: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


class Training:
    """A training on one process, with a model of two layers, its optimizer, and one batch per step.

    Args:
        root: Folder for the state.
        precision: Fabric's precision.
        error_feedback: The codec's setting.
        **settings: Settings of the strategy.
    """

    def __init__(self, root: Path, *, precision: str = "32-true", error_feedback: bool = True, **settings: Any) -> None:
        codec = TopK(0.05, error_feedback=error_feedback)
        strategy = SmartInfinityFabricStrategy(
            root / "state",
            compression=codec,
            transfer=SMALL_RING,
            initial_scale_power=8,
            **{"overlap": "none", **settings},
        )
        self.fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)  # type: ignore[arg-type]
        self.fabric.launch()
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.Tanh(), torch.nn.Linear(200, 8))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(module, optimizer)

    def step(self, number: int, factor: float = 1.0) -> None:
        """Run forward, backward and the update."""
        self.fabric.backward(self.model(batch_of(number)).square().mean() * factor)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def residual(self) -> torch.Tensor:
        """A copy of the residual."""
        held: Any = self.fabric.strategy
        return held._training_optimizer.rank_state.compressed.residual.clone()  # type: ignore[no-any-return]

    @property
    def state(self) -> dict[str, Any]:
        """The state that Fabric saves."""
        return {"model": self.model, "optimizer": self.optimizer}


def test_a_step_that_overflows_leaves_the_residual(tmp_path: Path) -> None:
    """A step that overflows in fp16 leaves the residual, which does not contain the loss scale."""
    training = Training(tmp_path, precision="16-mixed")
    training.step(0)
    before = training.residual
    training.step(1, factor=1e6)
    assert training.optimizer.overflow and before.any()
    assert torch.equal(training.residual, before)
    training.step(2)
    assert not training.optimizer.overflow
    after = training.residual
    assert torch.isfinite(after).all() and not torch.equal(after, before)
    assert after.abs().max() < 10 * before.abs().max()


def test_loading_replaces_the_residual(tmp_path: Path) -> None:
    """Loading replaces the residual by the checkpoint's, or by zero if the checkpoint has none."""
    without = Training(tmp_path / "without", error_feedback=False)
    without.step(0)
    without.fabric.save(tmp_path / "without.ckpt", without.state)
    training = Training(tmp_path / "with")
    training.step(0)
    saved = training.residual
    training.fabric.save(tmp_path / "with.ckpt", training.state)
    training.step(1)
    assert not torch.equal(training.residual, saved)
    training.fabric.load(tmp_path / "with.ckpt", training.state)
    assert saved.any() and torch.equal(training.residual, saved)
    training.fabric.load(tmp_path / "without.ckpt", training.state)
    assert not training.residual.any()


def set_gradient(training: Training) -> None:
    safe_set_full_grad(training.model.module[0].weight, torch.ones(200, 64))


def go_backward_elsewhere(training: Training) -> None:
    training.model.module(batch_of(1)).square().mean().backward()  # bypasses the engine: the step would refuse it


@pytest.mark.parametrize("write", [set_gradient, go_backward_elsewhere])
def test_gradients_that_come_beside_the_update(
    write: Callable[[Training], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual comes from the gradients of the step in flight, not from those that replace them."""
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)  # as on a GPU, or with several processes
    expected = Training(tmp_path / "expected")
    expected.step(0)
    training = Training(tmp_path / "overlapped", overlap="forward", zero={"reduce_bucket_size": 13_000})
    training.step(0)
    write(training)
    training.fabric.strategy.drain()  # type: ignore[attr-defined]
    assert torch.equal(training.residual, expected.residual)
