"""Where hooks would only cost time, forwards run without them, and their gradients and errors are the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations, paused
from lightning_smartinfinity.activations.tuning import tuner
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


Function = Callable[[torch.Tensor], torch.Tensor]


def step(activations: OffloadedActivations, numel: int, function: Function = many_small) -> bool:
    """Run a step, whose gradient must be that of autograd, and return whether it had hooks."""
    x = torch.linspace(0, 1, numel, requires_grad=True)
    with activations.forward(x):
        had_hooks = has_hooks()
        loss = function(x)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, torch.autograd.grad(function(x), x)[0])
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


@torch.no_grad()
def evaluated(x: torch.Tensor) -> None:
    many_small(x)


def raising(x: torch.Tensor) -> None:
    many_small(x)
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("forward", "has_batch"), [(torch.sin, True), (many_small, False), (evaluated, True), (raising, True)]
)
def test_hooks_stay(tmp_path: Path, forward: Callable[[torch.Tensor], object], has_batch: bool) -> None:
    """Hooks stay if they cost no time, or if the size of what the forward saves is unknown."""
    x = torch.randn(8, requires_grad=True)
    with opened(tmp_path) as activations:
        for _ in range(3):
            with suppress(ZeroDivisionError), activations.forward(*[x] * has_batch):
                assert has_hooks()
                forward(x)


AUTO = ActivationOffload(min_bytes=4096)


class Clock:
    """A clock that a busy machine does not disturb: it advances by a microsecond whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        Clock.now += 1e-6
        return Clock.now


def slow(x: torch.Tensor) -> torch.Tensor:
    """Save a few tensors, each of which takes a tenth of a second to compute."""
    for _ in range(3):
        x = (2 * x).sin()
        Clock.now += 0.1
    return x.sum()


@pytest.mark.parametrize(
    ("function", "settings", "has_memory", "num_with_hooks"),
    [
        (many_small, AUTO, True, 3),
        (many_small, AUTO, False, None),
        (many_small, ActivationOffload(min_bytes=4096, keep=0), True, None),
        (many_small, ActivationOffload(min_bytes=4096, budget_bytes="64MiB"), True, None),
        (slow, AUTO, True, None),
    ],
    ids=["tiny tensors", "no memory", "keep is set", "budget", "few tensors"],
)
def test_hooks_that_do_not_pay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: Function,
    settings: ActivationOffload,
    has_memory: bool,
    num_with_hooks: int | None,
) -> None:
    """With ``keep="auto"``, they are left out after the forward that keeps everything, if there is memory for that."""
    monkeypatch.setattr(time, "perf_counter", Clock())
    monkeypatch.setattr(tuner, "_LEAST_SECONDS", 0.0)
    if not has_memory:
        monkeypatch.setattr(tuner, "_SHARE_OF_MEMORY", 1 << 60)
    with opened(tmp_path, settings) as activations:
        had_hooks = [step(activations, numel, function) for numel in [*FIRST_SETTLED_FORWARD * [4096], 8192]]
    num_with = num_with_hooks or FIRST_SETTLED_FORWARD
    # What holds for one shape need not hold for another.
    assert had_hooks == [*num_with * [True], *(FIRST_SETTLED_FORWARD - num_with) * [False], True]
    told = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert len(told) == (num_with_hooks is not None)


# ---- code that torch compiles, of which some runs between its graphs, where torch would compile the hooks, too


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
