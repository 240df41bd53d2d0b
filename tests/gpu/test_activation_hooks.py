"""Hooks on a device, where they make steps longer if the device waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations
from lightning_smartinfinity.activations.tuning import hooks
from tests.activations.models import everything, opened
from tests.gpu.device_chains import profiles_of, run, tiny_chain
from tests.helpers.runif import RunIf

pytestmark = [RunIf(cuda_devices=1), pytest.mark.usefixtures("on_the_device")]

AUTO = everything(keep="auto", host_bytes="64MiB")
CHEAP, DEAR = 1.04, 1.06  # seconds of a step with hooks that takes one without


class Clock:
    """Lets time pass only as a test says, since any step may take long on a busy machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, has_hooks: bool, *, with_hooks: float) -> None:
        """Let a step pass, which takes a second without hooks."""
        self.now += with_hooks if has_hooks else 1.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which steps are compared."""
    clock = Clock()
    monkeypatch.setattr(hooks, "time", clock)
    return clock


@pytest.fixture
def all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries but the last one are offloaded, whatever was measured."""
    profiles_of(monkeypatch, kept=1)


def tiny(numel: int = 1 << 10) -> torch.Tensor:
    return torch.randn(numel, requires_grad=True)


def trained(
    offloaded: OffloadedActivations,
    clock: Clock,
    num_steps: int,
    *,
    with_hooks: float,
    numel: int = 1 << 10,
    others: dict[int, Callable[[], object]] | None = None,
) -> list[bool]:
    """Return whether each step has hooks. Before the steps of these numbers, others do something that is no step."""
    had = []
    for number in range(num_steps):
        if others and number in others:
            others[number]()
        x = tiny(numel)
        has_hooks, loss = run(offloaded, tiny_chain, x)
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, torch.autograd.grad(tiny_chain(x), x)[0])
        del loss
        clock.step(has_hooks, with_hooks=with_hooks)
        had.append(has_hooks)
    return had


def room_on_the_device(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (nbytes, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.max_memory_allocated)


@pytest.mark.parametrize(
    ("with_hooks", "room", "expected"),
    [(DEAR, True, False), (DEAR, False, True), (CHEAP, True, True)],
    ids=["hooks hold the device up", "there is no memory for more", "hooks run beside the device"],
)
@pytest.mark.usefixtures("all_but_one")
def test_hooks_that_do_not_pay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    with_hooks: float,
    room: bool,
    expected: bool,
) -> None:
    """With ``keep="auto"``, forwards have hooks until it was seen that steps are faster without."""
    if not room:
        room_on_the_device(monkeypatch, 0)
    with opened(tmp_path, AUTO) as offloaded:
        had_hooks = trained(offloaded, clock, FIRST_SETTLED_FORWARD + 2, with_hooks=with_hooks)
    # The first four are measured or have hooks. If there is memory, the next two have none.
    assert had_hooks == [*4 * [True], *2 * [not room], *3 * [expected]]
    told = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert len(told) == (not expected)


@pytest.mark.parametrize("other", ["a failed forward", "an evaluation"])
@pytest.mark.usefixtures("all_but_one")
def test_what_is_no_step(tmp_path: Path, clock: Clock, other: str) -> None:
    """A forward that raises is not taken for a fast step, nor is one without gradients."""

    def failing(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("everything stays on the device")

    def do_other() -> None:
        if other == "an evaluation":
            with torch.no_grad():
                run(offloaded, tiny_chain, tiny())
        else:
            with pytest.raises(torch.OutOfMemoryError):
                run(offloaded, failing, tiny())

    with opened(tmp_path, AUTO) as offloaded:
        assert trained(offloaded, clock, 9, with_hooks=CHEAP, others={5: do_other})[-1]


@pytest.mark.usefixtures("all_but_one")
def test_forwards_without_a_batch_are_not_compared(tmp_path: Path, clock: Clock) -> None:
    """Nobody knows then whether they are alike."""
    with opened(tmp_path, AUTO) as offloaded:
        for number in range(12):
            had, loss = run(offloaded, tiny_chain, x=tiny())
            loss.backward()
            if number != 5:
                clock.step(had, with_hooks=CHEAP)
        assert had


@pytest.mark.usefixtures("all_but_one")
def test_room_for_all_forwards_before_a_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Where several come before a backward, all that they save must fit into the device."""
    with opened(tmp_path, AUTO) as offloaded:
        room_on_the_device(monkeypatch, 2 * offloaded._tuner.plan.offloaded_bytes)
        for _ in range(6):
            found = []
            for _ in range(4):
                found.append(run(offloaded, tiny_chain, tiny()))
                clock.step(found[-1][0], with_hooks=DEAR)
            assert all(has_hooks for has_hooks, _ in found)
            sum(loss for _, loss in found).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("captured", [True, False], ids=["a captured forward", "kinds that take turns"])
def test_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    """A wait would make a capture fail. If batches change their shapes too often, the host stops to wait."""
    with opened(tmp_path, AUTO) as offloaded:
        for _ in range(3):  # torch.cuda.graph wants some before
            run(offloaded, tiny_chain, tiny())[1].backward()
        waits: list[None] = []
        monkeypatch.setattr(offloaded._store.devices, "wait", lambda: waits.append(None))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        for number in range(1 if captured else 60):
            loss = run(offloaded, tiny_chain, tiny(1024 + number % 2))[1]
            assert captured or loss.backward() is None
        assert len(waits) < (1 if captured else 40)


@pytest.mark.usefixtures("all_but_one")
def test_peaks_that_somebody_resets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The most that the device has held is remembered, as loggers forget it."""
    most, held, had = 1 << 40, 0, []

    def peaking(x: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held = most
        return tiny_chain(x)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, most))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: most)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held)
    with opened(tmp_path, AUTO) as offloaded:
        for _ in range(6):
            held = 0
            has_hooks, loss = run(offloaded, peaking, tiny())
            loss.backward()
            clock.step(has_hooks, with_hooks=DEAR)
            had.append(has_hooks)
        assert all(had)


@pytest.mark.usefixtures("all_but_one")
def test_another_kind_in_between(tmp_path: Path, clock: Clock) -> None:
    """Steps with batches of other shapes are compared with each other, not with those before."""
    with opened(tmp_path, AUTO) as offloaded:
        assert trained(offloaded, clock, 5, with_hooks=CHEAP) == [*4 * [True], False]
        assert trained(offloaded, clock, 1, numel=1025, with_hooks=DEAR) == [True]
        assert trained(offloaded, clock, 5, with_hooks=DEAR) == [True, True, False, False, False]
        # What was found stays, however many other kinds come.
        for number in range(40):
            trained(offloaded, clock, 1, numel=1026 + number, with_hooks=CHEAP)
        assert trained(offloaded, clock, 1, with_hooks=DEAR) == [False]
