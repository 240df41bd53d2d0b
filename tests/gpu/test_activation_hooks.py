"""Hooks on a device, where they make steps longer if the device waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD
from tests.activations.chains import chain
from tests.activations.models import everything, opened
from tests.gpu.device_chains import profiles_of, run, slow_chain, tiny_chain
from tests.helpers.runif import RunIf

pytestmark = RunIf(cuda_devices=1)

AUTO = {"keep": "auto", "host_bytes": "64MiB"}


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Tensors are made on the device."""
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


@pytest.fixture
def all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries but the last one are offloaded, whatever was measured."""
    profiles_of(monkeypatch, kept=1)


def tiny() -> torch.Tensor:
    return torch.randn(1 << 10, requires_grad=True)


def failing(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("everything stays on the device")


@pytest.mark.parametrize(
    ("function", "room", "expected"),
    [(tiny_chain, True, False), (tiny_chain, False, True), (slow_chain, True, True)],
    ids=["hooks hold the device up", "there is no memory for more", "hooks run beside the device"],
)
def test_hooks_that_do_not_pay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[torch.Tensor], torch.Tensor],
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
                loss = function(x)
            (found,) = torch.autograd.grad(loss, x)
            (wanted,) = torch.autograd.grad(function(x), x)
            assert torch.equal(found, wanted)
            del loss
    # The first four are measured or have hooks. If there is memory, the next two have none.
    assert had_hooks == [*4 * [True], *2 * [not room], *3 * [expected]]
    told = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert len(told) == (not expected)


@pytest.mark.usefixtures("all_but_one")
def test_a_failed_forward_without_hooks_is_no_step(tmp_path: Path) -> None:
    """A forward that raises is not taken for a fast step."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for number in range(10):
            try:
                had, loss = run(offloaded, failing if number == 5 else slow_chain, tiny())
                loss.backward()
            except torch.OutOfMemoryError:
                pass
        assert had


@pytest.mark.usefixtures("all_but_one")
def test_an_evaluation_is_no_step(tmp_path: Path) -> None:
    """Nor is one without gradients."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for number in range(10):
            if number == 5:
                with torch.no_grad():
                    run(offloaded, slow_chain, tiny())
            else:
                had, loss = run(offloaded, slow_chain, tiny())
                loss.backward()
        assert had


@pytest.mark.usefixtures("all_but_one")
def test_forwards_without_a_batch_are_not_compared(tmp_path: Path) -> None:
    """Nobody knows then whether they are alike."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for number in range(12):
            had, loss = run(offloaded, (lambda x: chain(x, 1)) if number == 5 else slow_chain, x=tiny())
            loss.backward()
        assert had


@pytest.mark.usefixtures("all_but_one")
def test_room_for_all_forwards_before_a_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several come before a backward, all that they save must fit into the device."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (2 * offloaded._lessons.plan.offloaded_bytes, 1 << 40)
        )
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.max_memory_allocated)
        had = []
        for _ in range(6):
            found = [run(offloaded, tiny_chain, tiny()) for _ in range(4)]
            had += [each for each, _ in found]
            sum(loss for _, loss in found).backward()  # type: ignore[union-attr]
            del found
        assert all(had)


def test_a_captured_forward_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait would make the capture fail."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        for _ in range(3):  # torch.cuda.graph wants some before
            run(offloaded, tiny_chain, tiny())[1].backward()
        waits: list[None] = []
        monkeypatch.setattr(offloaded._store, "wait_for_devices", lambda: waits.append(None))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        run(offloaded, tiny_chain, tiny())
        assert not waits


def test_kinds_that_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If batches change their shapes too often, the host stops waiting for the device."""
    with opened(tmp_path, everything(**AUTO)) as offloaded:
        waits: list[None] = []
        monkeypatch.setattr(offloaded._store, "wait_for_devices", lambda: waits.append(None))
        for number in range(100):
            run(offloaded, tiny_chain, torch.randn(1024 + number % 2, requires_grad=True))[1].backward()
        assert len(waits) < 50


@pytest.mark.usefixtures("all_but_one")
def test_peaks_that_somebody_resets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert all(had)
