"""Code that torch compiles, of which some runs between its graphs, where torch would compile the hooks, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import OffloadedActivations, paused
from tests.activations.models import everything, opened


def that_depends_on_values(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return y[y > 1].sin().sum()


def with_a_pause(x: torch.Tensor) -> torch.Tensor:
    with paused():
        y = x.sin().exp()
    return y.cos().sin().sum()


@pytest.mark.seam("OffloadedActivations: no compiled hooks between two graphs", "torch._dynamo.trace_rules.add.")
@pytest.mark.parametrize("function", [that_depends_on_values, with_a_pause])
@pytest.mark.parametrize("is_within", [False, True])
def test_code_between_graphs(tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor], is_within: bool) -> None:
    """Saved tensors move, and nothing is left, whether the offloading is entered around compiled code or within it."""

    def step(x: torch.Tensor, activations: OffloadedActivations) -> torch.Tensor:
        with activations.forward():
            return function(x)

    torch.compiler.reset()  # compile as if this were the first test
    with opened(tmp_path, everything()) as activations:
        for numel in (1000, 1001):  # the second time, torch compiles for all sizes
            x = torch.linspace(-1, 1, numel, requires_grad=True)
            if is_within:
                loss = torch.compile(step, backend="eager")(x, activations)
            else:
                with activations.forward():
                    loss = torch.compile(function, backend="eager")(x)
            (found,) = torch.autograd.grad(loss, x)
            (expected,) = torch.autograd.grad(function(x), x)
            assert torch.equal(found, expected)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert activations.traffic().offloaded_bytes > 0
