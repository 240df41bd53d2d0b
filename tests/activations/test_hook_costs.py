"""Where the hooks themselves would make steps longer, everything stays where it is, without hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD
from lightning_smartinfinity.activations.tuning import tuner
from tests.activations.models import opened

NUM_TINY = 500
AUTO = ActivationOffload(min_bytes=4096)


class Clock:
    """A clock that a busy machine does not disturb: it advances by a microsecond whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Slow(torch.autograd.Function):
    """Saves its input, and takes a tenth of a second of the :class:`Clock`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        if isinstance(time.perf_counter, Clock):
            time.perf_counter.now += 0.1
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + ctx.saved_tensors[0]


def tiny(x: torch.Tensor) -> torch.Tensor:
    """Save one large tensor, and hundreds of tiny ones."""
    y = (2 * x).sin()[:8]
    for _ in range(NUM_TINY):
        y = y.sin()
    return y.sum()


def slow(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = Slow.apply(2 * x)  # type: ignore[no-untyped-call]
    return x.sum()


@pytest.mark.parametrize(
    ("function", "settings", "has_memory", "num_with_hooks"),
    [
        (tiny, AUTO, True, 3),
        (tiny, AUTO, False, None),
        (tiny, ActivationOffload(min_bytes=4096, keep=0), True, None),
        (tiny, ActivationOffload(min_bytes=4096, budget_bytes="64MiB"), True, None),
        (slow, AUTO, True, None),
    ],
    ids=["tiny tensors", "no memory", "keep is set", "budget", "few tensors"],
)
def test_hooks_that_do_not_pay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[torch.Tensor], torch.Tensor],
    settings: ActivationOffload,
    has_memory: bool,
    num_with_hooks: int | None,
) -> None:
    """With ``keep="auto"``, they are left out after the forward that keeps everything, if there is memory for that."""
    monkeypatch.setattr(time, "perf_counter", Clock())
    monkeypatch.setattr(tuner, "_LEAST_SECONDS", 0.0)
    if not has_memory:
        monkeypatch.setattr(tuner, "_SHARE_OF_MEMORY", 1 << 60)
    had_hooks = []
    with opened(tmp_path, settings) as activations:
        for numel in [*FIRST_SETTLED_FORWARD * [4096], 8192]:
            x = torch.randn(numel, requires_grad=True)
            with activations.forward(x):
                had_hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
                loss = function(x)
            (found,) = torch.autograd.grad(loss, x)
            (expected,) = torch.autograd.grad(function(x), x)
            assert torch.equal(found, expected)
    num_with = num_with_hooks or FIRST_SETTLED_FORWARD
    # What holds for one shape need not hold for another.
    assert had_hooks == [*num_with * [True], *(FIRST_SETTLED_FORWARD - num_with) * [False], True]
    told = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert len(told) == (num_with_hooks is not None)
