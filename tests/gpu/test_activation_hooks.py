"""Hooks on a device, where they make steps longer if the device waits for the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD
from lightning_smartinfinity.activations.tuning import hooks
from tests.activations.models import everything, opened
from tests.gpu.device_chains import profiles_of, run, tiny_chain
from tests.helpers.runif import RunIf

pytestmark = [RunIf(cuda_devices=1), pytest.mark.usefixtures("on_the_device")]

AUTO = {"keep": "auto", "host_bytes": "64MiB"}
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


def tiny() -> torch.Tensor:
    return torch.randn(1 << 10, requires_grad=True)


def failing(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("everything stays on the device")


@pytest.mark.parametrize(
    ("with_hooks", "room", "expected"),
    [(DEAR, True, False), (DEAR, False, True), (CHEAP, True, True)],
    ids=["hooks hold the device up", "there is no memory for more", "hooks run beside the device"],
)
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
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 40))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.max_memory_allocated)
    profiles_of(monkeypatch, kept=1)
    with opened(tmp_path, everything(keep="auto", host_bytes="64MiB")) as offloaded:
        had_hooks = []
        for _ in range(FIRST_SETTLED_FORWARD + 2):
            x = torch.randn(1 << 10, requires_grad=True)
            with offloaded.forward(x):
                had_hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
                loss = tiny_chain(x)
            (found,) = torch.autograd.grad(loss, x)
            (wanted,) = torch.autograd.grad(tiny_chain(x), x)
            assert torch.equal(found, wanted)
            del loss
            clock.step(had_hooks[-1], with_hooks=with_hooks)
    # The first four are measured or have hooks. If there is memory, the next two have none.
    assert had_hooks == [*4 * [True], *2 * [not room], *3 * [expected]]
    told = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert len(told) == (not expected)


@pytest.mark.usefixtures("all_but_one")
def test_a_failed_forward_without_hooks_is_no_step(tmp_path: Path, clock: Clock) -> None:
    """A forward that raises is not taken for a fast step."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for number in range(10):
            try:
                had, loss = run(offloaded, failing if number == 5 else tiny_chain, tiny())
                loss.backward()
                clock.step(had, with_hooks=CHEAP)
            except torch.OutOfMemoryError:
                pass
        assert had


@pytest.mark.usefixtures("all_but_one")
def test_an_evaluation_is_no_step(tmp_path: Path, clock: Clock) -> None:
    """Nor is one without gradients."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for number in range(10):
            if number == 5:
                with torch.no_grad():
                    run(offloaded, tiny_chain, tiny())
            else:
                had, loss = run(offloaded, tiny_chain, tiny())
                loss.backward()
                clock.step(had, with_hooks=CHEAP)
        assert had


@pytest.mark.usefixtures("all_but_one")
def test_forwards_without_a_batch_are_not_compared(tmp_path: Path, clock: Clock) -> None:
    """Nobody knows then whether they are alike."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for number in range(12):
            had, loss = run(offloaded, tiny_chain, x=tiny())
            loss.backward()
            if number != 5:
                clock.step(had, with_hooks=CHEAP)
        assert had


@pytest.mark.usefixtures("all_but_one")
def test_room_for_all_forwards_before_a_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Where several come before a backward, all that they save must fit into the device."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (2 * offloaded._tuner.plan.offloaded_bytes, 1 << 40)
        )
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.max_memory_allocated)
        had = []
        for _ in range(6):
            found = []
            for _ in range(4):
                found.append(run(offloaded, tiny_chain, tiny()))
                had.append(found[-1][0])
                clock.step(had[-1], with_hooks=DEAR)
            sum(loss for _, loss in found).backward()  # type: ignore[union-attr]
            del found
        assert all(had)


def test_a_captured_forward_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait would make the capture fail."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for _ in range(3):  # torch.cuda.graph wants some before
            run(offloaded, tiny_chain, tiny())[1].backward()
        waits: list[None] = []
        monkeypatch.setattr(offloaded._store.devices, "wait", lambda: waits.append(None))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        run(offloaded, tiny_chain, tiny())
        assert not waits


def test_kinds_that_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If batches change their shapes too often, the host stops waiting for the device."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        waits: list[None] = []
        monkeypatch.setattr(offloaded._store.devices, "wait", lambda: waits.append(None))
        for number in range(100):
            run(offloaded, tiny_chain, torch.randn(1024 + number % 2, requires_grad=True))[1].backward()
        assert len(waits) < 50


@pytest.mark.usefixtures("all_but_one")
def test_peaks_that_somebody_resets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The most that the device has held is remembered, as loggers forget it."""
    most, held, had = 1 << 40, 0, []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, most))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: most)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held)
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for _ in range(6):
            held, x = 0, tiny()
            with offloaded.forward(x):
                had.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
                loss = tiny_chain(x)
                held = most
            loss.backward()
            del loss
            clock.step(had[-1], with_hooks=DEAR)
        assert all(had)


@pytest.mark.usefixtures("all_but_one")
def test_another_kind_in_between(tmp_path: Path, clock: Clock) -> None:
    """Steps with batches of other shapes are compared with each other, not with those before."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:

        def train(num_steps: int, numel: int, *, with_hooks: float) -> list[bool]:
            had = []
            for _ in range(num_steps):
                has_hooks, loss = run(offloaded, tiny_chain, torch.randn(numel, requires_grad=True))
                loss.backward()
                clock.step(has_hooks, with_hooks=with_hooks)
                had.append(has_hooks)
            return had

        assert train(5, 1024, with_hooks=CHEAP) == [*4 * [True], False]
        assert train(1, 1025, with_hooks=DEAR) == [True]
        assert train(5, 1024, with_hooks=DEAR) == [True, True, False, False, False]
        # What was found stays, however many other kinds come.
        for number in range(40):
            train(1, 1026 + number, with_hooks=CHEAP)
        assert train(1, 1024, with_hooks=DEAR) == [False]
