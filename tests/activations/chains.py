"""Chains of operations, each of which saves a tensor of one block, and what must be left of them: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import OffloadedActivations
from tests.activations.models import everything, opened
from tests.helpers.native_testing import inject
from tests.helpers.waiting import await_that

__all__ = [
    "BLOCK",
    "activations",
    "assert_nothing_is_left",
    "assert_right",
    "assert_step_is_right",
    "chain",
    "expected",
    "inject_now",
    "saved",
]

BLOCK = 4096


@pytest.fixture
def activations(tmp_path: Path) -> Iterator[OffloadedActivations]:
    """Yield offloading of everything through a pool for some blocks, which forward waits for."""
    with opened(tmp_path, everything(host_bytes=4 * BLOCK, budget_bytes=4 * BLOCK)) as activations:
        yield activations


def chain(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    for _ in range(length):
        x = x.sin()
    return x.sum()


def saved(
    activations: OffloadedActivations, length: int = 12, numel: int = BLOCK // 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input, by default of one block, and a loss."""
    x = torch.randn(numel, requires_grad=True)
    with activations.forward(x):
        return x, chain(x, length)


def expected(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(chain(x, length), x)
    return gradient


def assert_right(x: torch.Tensor, loss: torch.Tensor, length: int = 12) -> None:
    """Assert that backward gives the gradient that it gives without offloading."""
    loss.backward()
    assert torch.equal(x.grad, expected(x, length))


def assert_step_is_right(activations: OffloadedActivations, length: int = 12) -> None:
    """Assert that forward and backward of a chain give the gradient that they give without offloading."""
    assert_right(*saved(activations, length), length)


def inject_now(activations: OffloadedActivations, **faults: int) -> None:
    """Inject faults, or none, once the requests in flight have ended."""

    def could() -> bool:
        with suppress(ValueError):
            inject(activations._store.files.tensors.core, **faults)
            return True
        return False

    await_that(could)


def assert_nothing_is_left(activations: OffloadedActivations) -> None:
    def is_free() -> bool:
        activations.traffic()  # looks at what has ended
        return (activations.held_bytes, activations.storage_bytes) == (0, 0)

    await_that(is_free, told=lambda: f"{activations.held_bytes} {activations.storage_bytes}")
