"""What leaves a device: it goes into the pool, and only what the pool has no room for goes to storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations, lessons
from lightning_smartinfinity.activations.choice import Choice, Profile
from tests.activations.chains import chain
from tests.activations.models import everything, opened
from tests.helpers.native_testing import Throttle
from tests.helpers.runif import RunIf

pytestmark = RunIf(cuda_devices=1)

NUMEL = 1 << 16
NBYTES = 4 * NUMEL
LENGTH = 24


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Tensors are made on the device."""
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


def saved(offloaded: OffloadedActivations) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUMEL, requires_grad=True)
    with offloaded.forward(x):
        return x, chain(x, LENGTH)


def assert_right(x: torch.Tensor, loss: torch.Tensor) -> None:
    (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(chain(x, LENGTH), x)
    assert torch.equal(found, expected)


def choose_first(offloaded: OffloadedActivations) -> None:
    """Run micro-batches until what leaves is settled."""
    for _ in range(FIRST_SETTLED_FORWARD):
        assert_right(*saved(offloaded))


def test_what_fits_into_the_pool_is_not_written(tmp_path: Path) -> None:
    """Everything leaves the device, nothing is written, and nothing is read."""
    with opened(tmp_path, everything(host_bytes=2 * LENGTH * NBYTES)) as offloaded:
        choose_first(offloaded)
        before = offloaded.traffic()
        for _ in range(3):
            x, loss = saved(offloaded)
            assert offloaded.host_bytes >= (LENGTH - 1) * NBYTES
            assert_right(x, loss)
        after = offloaded.traffic()
        assert after.offloaded_bytes - before.offloaded_bytes == 3 * (LENGTH - 1) * NBYTES
        assert (after.written_bytes, after.read_bytes) == (before.written_bytes, before.read_bytes)


@pytest.mark.parametrize("room", [LENGTH // 2, 4])
def test_only_the_oldest_are_written(tmp_path: Path, room: int) -> None:
    """What the pool has no room for is written and read back, with an eighth of the pool to spare."""
    with opened(tmp_path, everything(host_bytes=room * NBYTES)) as offloaded:
        choose_first(offloaded)
        before = offloaded.traffic()
        with offloaded._store.lock:
            x = torch.randn(NUMEL, requires_grad=True)
            with offloaded.forward(x):
                y = x
                for _ in range(LENGTH):
                    y = y.sin()
                    torch.cuda.current_stream().synchronize()
                    # Storage keeps up, whatever is late.
                    while offloaded._store._writes.finish_first():
                        pass
        written = offloaded.traffic().written_bytes - before.written_bytes
        # The first of the chain saves the batch, which stays.
        assert written == (LENGTH - 1 - room + room // 8) * NBYTES
        assert_right(x, y.sum())
        assert offloaded.traffic().read_bytes > before.read_bytes


def test_forwards_that_share_the_pool(tmp_path: Path) -> None:
    """What a forward left in the pool is written when the next one needs the room."""
    with opened(tmp_path, everything(host_bytes=(LENGTH + 8) * NBYTES)) as offloaded:
        choose_first(offloaded)
        before = offloaded.traffic()
        graphs = []
        for _ in range(3):
            graphs.append(saved(offloaded))
            finish_writes_of_pool(offloaded)
        assert offloaded.traffic().written_bytes > before.written_bytes
        for graph in reversed(graphs):
            assert_right(*graph)


def finish_writes_of_pool(offloaded: OffloadedActivations) -> None:
    with offloaded._store.lock:
        while offloaded._store._writes.finish_first():
            pass


def test_storage_that_is_slow(tmp_path: Path) -> None:
    """With ``keep="auto"`` it does not matter how fast storage is where the pool has room for everything."""
    with opened(tmp_path, everything(keep="auto", host_bytes=2 * LENGTH * NBYTES)) as offloaded:
        throttle = Throttle(offloaded._store.files.core, offloaded._store.files._files.files)
        throttle.bytes_per_second = 1e6
        for _ in range(FIRST_SETTLED_FORWARD):
            x = torch.randn(NUMEL, requires_grad=True)
            with offloaded.forward(x):
                loss = slow_chain(x)
            loss.backward()
        choice = offloaded.choice
        assert choice is not None and choice.num_offloaded > 0
        throttle.bytes_per_second = 0


def test_times_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is how long the device takes, however far the host is ahead of it."""
    profiles: list[Profile] = []
    nothing = {"offloaded_bytes": 0, "kept_bytes": 0, "seconds": 0.0, "stall_seconds": 0.0, "peak_bytes": 0}
    monkeypatch.setattr(
        lessons, "choose", lambda profile, **_: profiles.append(profile) or Choice(num_offloaded=0, **nothing)
    )
    with opened(tmp_path, everything(host_bytes=2 * LENGTH * NBYTES)) as offloaded:
        for _ in range(3):
            x = torch.randn(NUMEL, requires_grad=True)
            with offloaded.forward(x):
                loss = slow_chain(x)
            loss.backward()
    (profile,) = profiles
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    Slow.apply(x)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    seconds = 0.9e-3 * begin.elapsed_time(end)
    assert [time > (number + 1) * seconds for number, time in enumerate(profile.times)] == LENGTH * [True]
    assert profile.forward_seconds > (LENGTH + 1) * seconds and profile.backward_seconds > (LENGTH - 1) * seconds
    assert profile.copies is not None and profile.copies.out_rate > 1e6 and profile.copies.in_rate > 1e6


@pytest.mark.parametrize("keep", [0, LENGTH // 2 * NBYTES])
def test_memory_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """However far the host is ahead of the device, forward and backward hold little more there than what is kept."""
    monkeypatch.setattr("lightning_smartinfinity.activations.pool._LEAST_UNDER_WAY_BYTES", 0)
    with opened(tmp_path, everything(keep=keep, host_bytes=2 * LENGTH * NBYTES)) as offloaded:
        choose_first(offloaded)

        def step() -> None:
            x = torch.randn(NUMEL, requires_grad=True)
            with offloaded.forward(x):
                loss = slow_chain(x)
            loss.backward()

        def plain_step() -> None:
            slow_chain(torch.randn(NUMEL, requires_grad=True)).backward()

        # What is on its way in one direction is two entries, and twice as many were not reached yet.
        assert peak(step) <= keep + peak(plain_step) - LENGTH * NBYTES + 8 * NBYTES


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


def peak(step: Callable[[], None]) -> int:
    """Return the most bytes of the device that a step holds, with those that copies still use."""
    for number in itertools.count():
        torch.cuda.synchronize()
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["active_bytes.all.current"]
        step()
        if number == 2:
            most: int = torch.cuda.memory_stats()["active_bytes.all.peak"]
            return most - before
    raise AssertionError


def tiny_chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(200):
        x = x.sin()
    return x.sum()


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
    costs = {"offloaded_bytes": 0, "kept_bytes": 0, "seconds": 0.0, "stall_seconds": 0.0, "peak_bytes": 0}
    all_but_one = Choice(num_offloaded=LENGTH - 1, **costs)
    monkeypatch.setattr(lessons, "choose", lambda *_, **__: all_but_one)
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
