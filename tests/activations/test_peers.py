"""What other offloading gets silently wrong: ours is right, or raises as autograd does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_smartinfinity import ActivationOffload
from tests.activations.models import everything, opened
from tests.helpers.waiting import await_that

Hooks = Callable[[], AbstractContextManager[Any]]


def values(*size: int) -> torch.Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu")
    return drawn.to(torch.get_default_device()).requires_grad_()


def in_place(forward: Hooks) -> torch.Tensor:
    x = values(4, 4)
    with forward():
        y = x * 2
        z = y.sin()
        y.add_(1)
    z.sum().backward()
    return x.grad


def offset_view(forward: Hooks) -> torch.Tensor:
    x = values(4, 12)
    with forward():
        q, k, v = (x * 2).chunk(3, dim=-1)
        z = (q * k).exp() * v
    z.sum().backward()
    return x.grad


def transposed_square(forward: Hooks) -> torch.Tensor:
    x = values(5, 5)
    with forward():
        y = x * 2
        z = (y.sin() @ y.t().cos()) * y.exp() + y.t() * y.t().square() + y.square()
    z.sum().backward()
    return x.grad


def expanded_row(forward: Hooks) -> torch.Tensor:
    x = values(1, 6)
    with forward():
        y = x * 2
        z = y.expand(6, 6).square() + y.expand(6, 6).t().square() + y.square()
    z.sum().backward()
    return x.grad


class Twice(torch.autograd.Function):
    """A function that looks at its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(first, second)
        return gradient * (first + second)


def second_access(forward: Hooks) -> torch.Tensor:
    x = values(4, 4)
    with forward():
        z = Twice.apply(x * 3)
    z.sum().backward()
    return x.grad


CASES = [offset_view, transposed_square, expanded_row, second_access]


@pytest.mark.parametrize("host_bytes", [64 << 20, 4096])
@pytest.mark.parametrize("case", CASES)
def test_ours_is_exact(tmp_path: Path, case: Callable[[Hooks], torch.Tensor], host_bytes: int) -> None:
    """Every gradient is that of autograd alone, from the pool and from storage, however often it is asked for."""
    expected = case(lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t))
    for seed in range(4):
        settings = everything(host_bytes=host_bytes, budget_bytes=None if host_bytes > 4096 else 4096)
        with opened(tmp_path, settings, faults={"seed": seed, "max_delay_us": 200}) as activations:
            assert torch.equal(case(activations.forward), expected)
            assert activations.traffic().offloaded_bytes > 0


@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_a_change_in_place_raises(tmp_path: Path, min_bytes: int) -> None:
    """What was saved and changed afterwards makes backward raise as autograd does, offloaded or not."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_place(lambda: torch.autograd.set_grad_enabled(True))
    with (
        opened(tmp_path, everything(min_bytes=min_bytes)) as activations,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        in_place(activations.forward)


class Overwriting(torch.autograd.Function):
    """A function whose backward computes its gradient in the memory of a saved tensor, as some fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y)
        return y.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y.exp_() * 2


def overwritten(forward: Hooks) -> torch.Tensor:
    x = values(4, 4)
    with forward():
        z = Overwriting.apply(x).sum()
    (gradient,) = torch.autograd.grad(z, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z, x)
    return gradient


@pytest.mark.parametrize("settings", [everything(), everything(keep=1 << 20)], ids=["offloaded", "kept"])
def test_a_change_in_backward_raises_in_the_next(tmp_path: Path, settings: ActivationOffload) -> None:
    """Backward may overwrite what it gets, and a second backward through the same graph raises as in autograd."""
    expected = overwritten(nullcontext)
    with opened(tmp_path, settings) as activations:
        assert torch.equal(overwritten(activations.forward), expected)


def test_an_exception_in_forward_leaves_nothing(tmp_path: Path) -> None:
    """What was saved before the exception is gone, and the next forward and backward are right."""
    x = values(4, 4)
    with opened(tmp_path) as activations:

        def fail() -> None:
            with activations.forward():
                raise ZeroDivisionError((x * 2).exp())

        with pytest.raises(ZeroDivisionError):
            fail()
        await_that(lambda: activations.held_bytes == 0)  # what was being written may take a moment
        with activations.forward():
            z = (x * 2).exp().sum()
        (found,) = torch.autograd.grad(z, x)
    assert torch.equal(found, torch.autograd.grad((x * 2).exp().sum(), x)[0])
