"""Gradients with everything offloaded are those of autograd alone, to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations, paused
from lightning_smartinfinity.activations.tuning import tuner
from lightning_smartinfinity.activations.tuning.choice import Choice, Profile
from lightning_smartinfinity.pipeline.layout.free_memory import MemoryLimit, MemoryReport
from tests.activations.chains import chain
from tests.activations.models import COMPILED, MODELS, everything, gradients, opened
from tests.helpers.assertions import differing
from tests.helpers.long_cases import long_but

DELAYS = {"max_delay_us": 300, "short_transfer_every": 3}
ROOMY, TIGHT = everything(), everything(host_bytes=16 * 1024, budget_bytes=32 * 1024)


def assert_same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert [list(step) for step in found] == [list(step) for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert differing(one, other) == []


@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in COMPILED])
def test_everything_offloaded(tmp_path: Path, name: str, settings: ActivationOffload) -> None:
    """From a pool that holds everything and from storage, gradients are the same in every repetition."""
    expected = gradients(name)
    for seed in range(2):
        with opened(tmp_path, settings, faults=DELAYS | {"seed": seed}) as activations:
            assert_same(gradients(name, activations), expected)
            traffic = activations.traffic()
            assert traffic.offloaded_bytes > 0
            assert settings is ROOMY or "checkpoints" in name or traffic.read_bytes > 0


@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("backend", long_but(["aot_eager"], COMPILED))
def test_a_compiled_module(tmp_path: Path, backend: str, settings: ActivationOffload) -> None:
    """Tensors that a compiled region saves move to storage like all others, and gradients are the same."""
    test_everything_offloaded(tmp_path, backend, settings)


@pytest.mark.parametrize("verify", [True, False])
def test_automatic_settings(tmp_path: Path, verify: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With what is chosen from a measurement, gradients are the same, in the step that is measured and later.

    One line of the log shows what was chosen.
    """
    caplog.set_level("INFO", logger="lightning_smartinfinity.activations")
    expected = gradients("dropout", steps=4)
    with opened(tmp_path, ActivationOffload(min_bytes=64, verify=verify)) as activations:
        assert_same(gradients("dropout", activations, steps=4), expected)
        choice = activations.choice
        assert choice is not None and choice.offloaded_bytes + choice.kept_bytes > 0
    told = [record.getMessage() for record in caplog.records if "that forward saves" in record.getMessage()]
    assert told and "MB are kept" in told[0] and "storage was seen to write" in told[0]


@pytest.mark.parametrize(
    ("lengths", "made_before"),
    [((100, 100, 100, 105, 120, 120, 100, 100), [2, 5, 7]), ((100, 100, 100, 106, 112, 118, 124), [2, 5])],
    ids=["jumps", "drift"],
)
def test_the_choice_follows_the_sizes_of_batches(tmp_path: Path, lengths: list[int], made_before: list[int]) -> None:
    """It is made after the second micro-batch, and again when what forward saves has changed by a tenth or more.

    The first micro-batch of all takes longer than others.
    """
    with opened(tmp_path, ActivationOffload(min_bytes=1)) as activations:
        choices = [None]
        for length in lengths:
            x = torch.randn(1000, requires_grad=True)
            with activations.forward(x):  # learns from the step before
                choices.append(activations.choice)
                loss = chain(x, length)
            loss.backward()
            activations._last.waited_seconds = 0.0  # whatever else the machine does
    changed = [number - 1 for number in range(1, len(choices)) if choices[number] is not choices[number - 1]]
    assert changed == made_before


def offloaded_by_step(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    pays: int,
    steps: int,
    waits: Callable[[int], bool] = lambda planned: False,
    seconds: Callable[[int], float] | None = None,
    longer: int = 0,
) -> list[int]:
    """Return how many tensors each step plans to offload.

    Args:
        folder: Storage folder.
        monkeypatch: Replaces the choice.
        pays: Number of tensors that the choice always finds to pay; forward saves one more.
        steps: Number of steps.
        waits: Whether backward waits for long, after this number of tensors was planned.
        seconds: Returns how long forward and backward seem to take if this number of tensors is offloaded; None: as
            long as they do. They are compared if that is at least 0.1.
        longer: Number of tensors that every other step saves, and that pay, besides.
    """
    nothing = {"offloaded_bytes": 0, "kept_bytes": 0, "seconds": 0.0, "stall_seconds": 0.0, "peak_bytes": 0}
    if seconds is not None:
        monkeypatch.setattr(tuner, "_LEAST_SECONDS", 0.1)
    x, offloaded = torch.randn(1024, requires_grad=True), list[int]()

    def choose(profile: Profile, *, most_bytes: int | None, **_: Any) -> Choice:
        pay = len(profile.sizes)
        return Choice(num_offloaded=pay if most_bytes is None else min(pay, most_bytes // x.nbytes), **nothing)

    monkeypatch.setattr(tuner, "choose", choose)
    with opened(folder, ActivationOffload(min_bytes=1)) as activations:
        for number in range(steps):
            with activations.forward(x):  # learns from the step before
                offloaded.append(activations._tuner.plan.offloaded_bytes // x.nbytes)
                loss = chain(x, pays + 1 + number % 2 * longer)
            loss.backward()
            last = activations._last
            if seconds is not None:
                last.began = last.first_use = last.held_up_seconds = last.hook_seconds = 0.0
                last.ended = last.last_use = seconds(last.limit // x.nbytes) / 2
            last.waited_seconds = 1e3 * waits(offloaded[-1])
        return offloaded


def seconds_on_a_busy_processor(planned: int) -> float:
    """Each tensor that is offloaded costs a hundredth of the time."""
    return 1 + planned / 100


STEPS: dict[str, tuple[dict[str, Any], list[int]]] = {
    # Backward waits although none of it was predicted: a quarter less is offloaded than in the step before, in whole
    # tensors.
    "waits": ({"pays": 12, "steps": 5, "waits": lambda planned: True}, [0, 0, 12, 9, 6]),
    # A single wait does not keep memory in use for ever; where waits recur, it is tried ever more rarely.
    "waits at times": (
        {"pays": 4, "steps": 19, "waits": lambda planned: planned == 4},
        [0, 0, 4, *3 * [3], 4, *6 * [3], 4, *5 * [3]],
    ),
    # Three steps take 12 % longer than one that keeps everything, so that then only what costs 2.5 % is offloaded. The
    # rest is chosen again as after waits.
    "a busy processor": (
        {"pays": 12, "steps": 14, "seconds": seconds_on_a_busy_processor},
        [0, 0, 0, *3 * [12], *3 * [2], *3 * [12], 2, 2],
    ),
}


def memory_with(free: int, *, reserved: int) -> MemoryReport:
    """Return the report of a large machine, most of whose memory holds optimizer state."""
    limits = {"machine": MemoryLimit(1 << 42, 1 << 42), "group": MemoryLimit(1 << 42, free)}
    return MemoryReport(machine="", limits=limits, reserved=reserved)


@pytest.mark.parametrize("name", STEPS)
def test_less_is_offloaded_where_it_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where backward waits, or the processor has other work, less is offloaded, and later what was chosen before."""
    monkeypatch.setattr(tuner, "_PATIENCE", 3)
    monkeypatch.setattr(tuner, "measure_memory", partial(memory_with, 8 * 12 * 4096))
    settings, expected = STEPS[name]
    assert offloaded_by_step(tmp_path, monkeypatch, **settings) == expected


def test_less_is_offloaded_whatever_size_batches_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compared, and all that follow offload less, although each has another size than the one before."""
    offloaded = offloaded_by_step(
        tmp_path, monkeypatch, pays=12, longer=4, steps=15, seconds=lambda planned: 2.0 if planned else 1.0
    )
    assert max(offloaded[3:6]) >= 12 and max(offloaded[7:]) < 4


@pytest.mark.parametrize("slow", [{4}, {3, 5}, {6, 7, 8, 9, 10}])
def test_other_slow_steps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: set[int]) -> None:
    """Any step may be slow, for reasons unrelated to offloading. Only three in a row are compared."""
    steps = count()
    assert offloaded_by_step(
        tmp_path, monkeypatch, pays=12, steps=11, seconds=lambda planned: 1 + (next(steps) in slow)
    ) == [0, 0, 0, *8 * [12]]


@pytest.mark.parametrize("reason", ["no memory", "short steps"])
def test_steps_that_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """No step keeps everything where that could take more than an eighth of free memory, or would show nothing."""
    free, factor = (8 * 12 * 4096 - 1, 1.0) if reason == "no memory" else (1 << 40, 0.08)
    monkeypatch.setattr(tuner, "measure_memory", partial(memory_with, free))
    assert offloaded_by_step(
        tmp_path, monkeypatch, pays=12, steps=8, seconds=lambda planned: factor * seconds_on_a_busy_processor(planned)
    ) == [0, 0, *6 * [12]]


# ---- where hooks would only cost time, forwards run without them, and their gradients and errors are the same


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
    """All saved tensors are offloaded and freed, if the offloading begins around compiled code or within it."""

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
            assert torch.equal(found, expected) and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert activations.traffic().offloaded_bytes > 0
