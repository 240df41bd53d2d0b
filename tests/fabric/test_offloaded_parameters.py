"""Parameters on storage and compiled modules do not change the bits of a Fabric loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.fabric.test_loops import loss_of, set_up
from tests.fabric.worker import Run, quiet_fabric, train
from tests.helpers.models import Recipe

NVME: dict[str, Any] = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
RECIPE = Recipe(
    precision="bf16-mixed", groups=True, accumulate=2, skip_side_at=(1,), frozen=True, odd=True, max_steps=4
)


def test_parameters_on_storage_train_and_resume_to_the_same_bits(tmp_path: Path) -> None:
    """Losses and masters equal those with parameters in memory, uninterrupted and resumed."""
    plain = train(Run(out=str(tmp_path / "a"), recipe=RECIPE))
    options = {"zero": {**NVME, "sub_group_size": 3000}}
    straight = train(Run(out=str(tmp_path / "b"), recipe=RECIPE, options=options, save_at=(2,)))
    assert not list((tmp_path / "b" / "storage").rglob("*.bin"))
    checkpoint = str(tmp_path / "b" / "step-2.ckpt")
    resumed = train(Run(out=str(tmp_path / "c"), recipe=RECIPE, options=options, resume=checkpoint))
    assert straight.losses == plain.losses
    assert resumed.losses == plain.losses[4:]
    for name, master in plain.masters.items():
        assert torch.equal(straight.masters[name], master), name
        assert torch.equal(resumed.masters[name], master), name


def wide() -> nn.Sequential:
    """Return a model whose weights take at least one block, so that they go to storage."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 256), inner, nn.Linear(256, 8))


def losses_of_steps(build: Callable[[], nn.Module], root: Path, *, partitioned: bool = False, **options: Any) -> Any:
    """Train for three steps and return the losses, and whether parameters were on storage."""
    fabric = quiet_fabric(root, options=options)
    with fabric.init_module() if partitioned else nullcontext():
        net = build()
    model, optimizer = set_up(fabric, net)
    strategy: Any = fabric.strategy
    losses, stored = [], strategy.parameter_bytes > 0
    for step in range(3):
        loss = loss_of(model, step)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    strategy.close()
    return losses, stored


def test_a_model_built_into_storage_trains_to_the_same_bits(tmp_path: Path) -> None:
    """Under init_module parameters go to storage as they are built."""
    expected, _ = losses_of_steps(wide, tmp_path / "a")
    assert losses_of_steps(wide, tmp_path / "b", partitioned=True, zero=NVME) == (expected, True)
