"""Forwards that save nothing to offload run without hooks, and their gradients and errors are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import OffloadedActivations
from tests.activations.models import everything, opened


def many_small(x: torch.Tensor) -> torch.Tensor:
    """Save ``x`` and eleven tensors of its size, and a thousand small ones."""
    for _ in range(12):
        x = x.sin()
    y = x[:4]
    for _ in range(1000):
        y = y.sin()
    return y.sum() + x.sum()


def has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def step(activations: OffloadedActivations, numel: int) -> bool:
    """Run a step, whose gradient must be that of autograd, and return whether it had hooks."""
    x = torch.linspace(0, 1, numel, requires_grad=True)
    with activations.forward(x):
        had_hooks = has_hooks()
        loss = many_small(x)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, torch.autograd.grad(many_small(x), x)[0])
    return had_hooks


def test_hooks_are_left_out_until_a_batch_has_another_shape(tmp_path: Path) -> None:
    """A larger batch is offloaded at once, and also what has been small before."""
    with opened(tmp_path, everything(min_bytes=1024)) as activations:
        assert [step(activations, 8) for _ in range(3)] == [True, False, False]
        assert activations.traffic().saved_bytes == 0
        assert step(activations, 1024) and activations.traffic().saved_bytes == 11 * 4096
        assert [step(activations, 8) for _ in range(2)] == [True, False]


def test_a_budget_holds_for_every_forward(tmp_path: Path) -> None:
    """Hooks are never left out, as batches of equal shapes may save other tensors."""
    with opened(tmp_path, everything(min_bytes=1024, host_bytes="1MiB", budget_bytes="2MiB")) as activations:
        assert all(step(activations, 8) for _ in range(3))


def test_hooks_are_back_when_the_batch_or_the_module_is_another(tmp_path: Path) -> None:
    """A batch of another dtype, and training after evaluation, may save other tensors."""
    module = torch.nn.Dropout()
    with opened(tmp_path, everything(min_bytes=1024), module=module) as activations:
        assert [step(activations, 8) for _ in range(2)] == [True, False]
        with activations.forward(torch.ones(8, dtype=torch.float64)):
            assert has_hooks()
        assert [step(activations, 8) for _ in range(2)] == [True, False]
        module.eval()
        assert [step(activations, 8) for _ in range(2)] == [True, False]


def test_forwards_are_looked_at_again(tmp_path: Path) -> None:
    """One forward in 32 has hooks, so that a model that saves more of an equal batch is offloaded again."""
    with opened(tmp_path, everything(min_bytes=1024)) as activations:
        assert [step(activations, 8) for _ in range(66)] == ([True] + [False] * 31) * 2 + [True, False]
        x = torch.randn(8, requires_grad=True)
        for _ in range(31):
            with activations.forward(x):
                loss = (x.expand(1024, 8) * 2).sin().sum()
            loss.backward()
        assert activations.traffic().saved_bytes > 0


@pytest.mark.parametrize("case", ["few", "no batch", "evaluation", "exception"])
def test_hooks_stay(tmp_path: Path, case: str) -> None:
    """They stay if they take no time, if nothing tells the size, and if the forward does not say what it saves."""
    x = torch.randn(8, requires_grad=True)

    def forward() -> None:
        if case == "few":
            x.sin()
        elif case == "evaluation":
            with torch.no_grad():
                many_small(x)
        else:
            many_small(x)
            if case == "exception":
                raise ZeroDivisionError

    with opened(tmp_path) as activations:
        for _ in range(3):
            try:
                with activations.forward(*([] if case == "no batch" else [x])):
                    assert has_hooks()
                    forward()
            except ZeroDivisionError:
                pass


def test_a_change_in_place_raises_without_hooks(tmp_path: Path) -> None:
    """Autograd looks for changes itself where there are no hooks."""
    x = torch.randn(8, requires_grad=True)
    with opened(tmp_path, everything(min_bytes=1024)) as activations:
        step(activations, 8)
        with activations.forward(x):
            assert not has_hooks()
            y = x * 2
            loss = y.sin().sum()
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
