"""Chains of operations on a device, which save tensors, and what the tests of activations there do with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations
from lightning_smartinfinity.activations.tuning import tuner
from lightning_smartinfinity.activations.tuning.choice import Choice, Profile
from tests.activations.chains import chain

__all__ = [
    "LENGTH",
    "NBYTES",
    "NUMEL",
    "Slow",
    "assert_right",
    "choose_first",
    "finish_writes_of_pool",
    "profiles_of",
    "run",
    "saved",
    "slow_chain",
    "slow_seconds",
    "tiny_chain",
]

NUMEL = 1 << 16
NBYTES = 4 * NUMEL
LENGTH = 24


def run(
    offloaded: OffloadedActivations,
    function: Callable[[torch.Tensor], torch.Tensor],
    *batch: torch.Tensor,
    x: torch.Tensor | None = None,
) -> tuple[bool, torch.Tensor]:
    """Return whether a forward has hooks, and its loss."""
    with offloaded.forward(*batch):
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return has_hooks, function(batch[0] if x is None else x)


def profiles_of(monkeypatch: pytest.MonkeyPatch, *, kept: int) -> list[Profile]:
    """Offload all but ``kept`` entries, whatever is measured, and return a list that gets the profiles."""
    profiles: list[Profile] = []
    costs = {"offloaded_bytes": 0, "kept_bytes": 0, "seconds": 0.0, "stall_seconds": 0.0, "peak_bytes": 0}

    def choose(profile: Profile, **_: object) -> Choice:
        profiles.append(profile)
        return Choice(num_offloaded=max(0, len(profile.sizes) - kept), **costs)  # type: ignore[arg-type]

    monkeypatch.setattr(tuner, "choose", choose)
    return profiles


def saved(offloaded: OffloadedActivations) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input, and a loss."""
    x = torch.randn(NUMEL, requires_grad=True)
    with offloaded.forward(x):
        return x, chain(x, LENGTH)


def assert_right(x: torch.Tensor, loss: torch.Tensor) -> None:
    """Check that the gradient is that of autograd alone."""
    (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(chain(x, LENGTH), x)
    assert torch.equal(found, expected)


def choose_first(offloaded: OffloadedActivations) -> None:
    """Run micro-batches until it is settled what is offloaded."""
    for _ in range(FIRST_SETTLED_FORWARD):
        assert_right(*saved(offloaded))


def finish_writes_of_pool(offloaded: OffloadedActivations) -> None:
    """Wait until all writes that have begun have ended."""
    with offloaded._store.lock:
        while offloaded._store.writes.finish_first():
            pass


class Slow(torch.autograd.Function):
    """Saves its input, and takes the device some milliseconds forward and backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        torch.cuda._sleep(10**7)
        return x.sin()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(10**7)
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * x.cos()


def slow_chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(LENGTH + 1):
        x = Slow.apply(x)  # type: ignore[no-untyped-call]
    return x.sum()


def tiny_chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        x = x.sin()
    return x.sum()


def slow_seconds() -> float:
    """Return for how long the device is busy with one operation of a slow chain, at least."""
    found, x = [], torch.randn(NUMEL)
    for _ in range(5):  # others may use the device
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        Slow.apply(x)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        found.append(1e-3 * begin.elapsed_time(end))
    return min(found)
