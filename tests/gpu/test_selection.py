"""A real CUDA device selects the same gradients as the host, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import TopK
from lightning_smartinfinity.pipeline.gradients.device_selection import top_k_payload, with_residual
from tests.helpers.models import Recipe
from tests.helpers.runif import RunIf
from tests.training.worker import Run, launch

pytestmark = RunIf(cuda_devices=1)


def values_of(numel: int, seed: int) -> torch.Tensor:
    """Return values with ties, zeros, subnormals, and numbers that no 16-bit type holds."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.5, -0.5, 0.0, -0.0, 1e-40, 7e4, -3.4e38, math.inf])
    picked = special[torch.randint(len(special), (numel,), generator=generator)]
    chosen = torch.rand(numel, generator=generator) < 0.3
    return torch.where(chosen, picked, torch.randn(numel, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 65_537, 1_000_003])
@pytest.mark.parametrize("ratio", [1e-5, 0.01, 0.9, 1.0])
def test_payloads_are_those_of_the_host(numel: int, ratio: float, dtype: torch.dtype) -> None:
    values = values_of(numel, seed=numel)
    taken = torch.arange(numel) % 7 != 3
    expected = top_k_payload(values, ratio=ratio, value_dtype=dtype, taken=taken)
    assert torch.equal(top_k_payload(values.cuda(), ratio=ratio, value_dtype=dtype, taken=taken.cuda()).cpu(), expected)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_what_was_not_sent_is_added_as_on_the_host(scale: float) -> None:
    """The device rounds after each operation, without fusing them."""
    gradient, residual = values_of(100_000, seed=1), values_of(100_000, seed=2).clamp(-1e30, 1e30)
    total = with_residual(gradient.cuda(), residual.cuda(), scale).cpu()
    assert torch.equal(total.view(torch.int32), with_residual(gradient, residual, scale).view(torch.int32))


@pytest.mark.parametrize("offload", [{}, {"offload_param": {"device": "cpu"}}])
def test_a_training_is_the_same_wherever_is_selected(offload: dict[str, Any], tmp_path: Path) -> None:
    """With exact=False the host selects, and it selects exactly among so few elements."""
    recipe = Recipe(precision="bf16-mixed", clip=0.5, accumulate=2, max_steps=4)
    by_device, by_host = (
        launch(
            Run(
                out=str(tmp_path / f"{exact}"),
                recipe=recipe,
                accelerator="cuda",
                deterministic=True,
                options={"compression": TopK(0.05, exact=exact), "zero": offload},
            )
        )[0]
        for exact in (True, False)
    )
    assert by_device.losses == by_host.losses
    assert all(torch.equal(by_device.masters[name], master) for name, master in by_host.masters.items())
