"""Tensors are evicted from a device into the pool, and only those for which it has no room are written to storage.

Hooks are left out where they make steps longer, since the device waits for the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations
from lightning_smartinfinity.activations.tuning import hooks
from tests.activations.chains import chain
from tests.activations.models import everything, opened
from tests.gpu.device_chains import (
    LENGTH,
    NBYTES,
    NUMEL,
    assert_right,
    choose_first,
    finish_writes_of_pool,
    profiles_of,
    run,
    saved,
    slow_chain,
    slow_seconds,
    tiny_chain,
)
from tests.helpers.native_testing import Throttle
from tests.helpers.runif import RunIf

pytestmark = [RunIf(cuda_devices=1), pytest.mark.usefixtures("on_the_device")]


def test_what_fits_into_the_pool_is_not_written(tmp_path: Path) -> None:
    """Everything is evicted from the device, nothing is written, and nothing is read."""
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


def slowly_saved(offloaded: OffloadedActivations) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input, and a loss. Device and storage keep up with each operation, whatever is late."""
    x = torch.randn(NUMEL, requires_grad=True)
    with offloaded.forward(x):
        y = x
        for _ in range(LENGTH):
            y = y.sin()
            torch.cuda.current_stream().synchronize()
            finish_writes_of_pool(offloaded)
        return x, y.sum()


@pytest.mark.parametrize("room", [LENGTH // 2, 4])
def test_only_the_oldest_are_written(tmp_path: Path, room: int) -> None:
    """They are written and read back if the pool has no room for them, with an eighth of it to spare."""
    with opened(tmp_path, everything(host_bytes=room * NBYTES)) as offloaded:
        choose_first(offloaded)
        before = offloaded.traffic()
        with offloaded._store.lock:
            x, loss = slowly_saved(offloaded)
        written = offloaded.traffic().written_bytes - before.written_bytes
        # The first of the chain saves the batch, which stays.
        assert written == (LENGTH - 1 - room + room // 8) * NBYTES
        assert_right(x, loss)
        assert offloaded.traffic().read_bytes > before.read_bytes


def test_forwards_that_share_the_pool(tmp_path: Path) -> None:
    """Tensors that a forward left in the pool are written when the next one needs the room."""
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


def test_times_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of the device, however far the host is ahead of it."""
    profiles = profiles_of(monkeypatch, kept=LENGTH)
    with opened(tmp_path, everything(host_bytes=2 * LENGTH * NBYTES)) as offloaded:
        for _ in range(3):
            run(offloaded, slow_chain, torch.randn(NUMEL, requires_grad=True))[1].backward()
    (profile,) = profiles
    seconds = 0.9 * slow_seconds()
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
            run(offloaded, slow_chain, torch.randn(NUMEL, requires_grad=True))[1].backward()

        def plain_step() -> None:
            slow_chain(torch.randn(NUMEL, requires_grad=True)).backward()

        # What is on its way in one direction is two entries, and twice as many were not reached yet.
        # Where copies are held up because others use the machine, more stays.
        assert min(peak(step) for _ in range(3)) <= keep + peak(plain_step) - LENGTH * NBYTES + 8 * NBYTES


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


def test_times_leave_out_waits_for_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward is not measured to be slow because it has waited for storage."""
    profiles = profiles_of(monkeypatch, kept=LENGTH)
    with opened(tmp_path, everything(host_bytes=3 * NBYTES, budget_bytes=4 * NBYTES)) as offloaded:
        throttle = Throttle(offloaded._store.files.tensors.core, offloaded._store.files.tensors._files.files)
        assert_right(*saved(offloaded))
        throttle.bytes_per_second = 2e6
        x, loss = saved(offloaded)
        throttle.bytes_per_second = 0
        held_up = offloaded._last.held_up_seconds  # type: ignore[union-attr]
        torch.autograd.grad(loss, x)
        saved(offloaded)
    (profile,) = profiles
    assert profile.forward_seconds < held_up / 2


def test_small_cached_ones_make_room_for_large_ones(tmp_path: Path) -> None:
    """As many of them are written as a large tensor needs."""
    with opened(tmp_path, everything(host_bytes=8 * NBYTES)) as offloaded:

        def small() -> torch.Tensor:
            return run(offloaded, lambda x: chain(x, 128), torch.randn(NUMEL // 16, requires_grad=True))[1]

        for _ in range(FIRST_SETTLED_FORWARD):
            small().backward()
        kept = small()
        torch.cuda.synchronize()
        finish_writes_of_pool(offloaded)
        before = offloaded.traffic()
        loss = slowly_saved(offloaded)[1]
        kept_for_room = offloaded.traffic().kept_for_room_bytes - before.kept_for_room_bytes
        loss.backward()
        kept.backward()
        assert kept_for_room <= 2 * NBYTES, kept_for_room / NBYTES


def test_nothing_grows_with_the_number_of_steps(tmp_path: Path) -> None:
    """An old graph keeps nothing of the newer ones, nor do uses of a measured graph, or forwards without backward."""
    with opened(tmp_path, everything(host_bytes=3 * LENGTH * NBYTES)) as offloaded:
        assert_right(*saved(offloaded))
        x, loss = saved(offloaded)
        for _ in range(10):
            torch.autograd.grad(loss, x, retain_graph=True)
            torch.cuda.synchronize()
        assert len(offloaded._last.clock._waits) <= 2 * LENGTH  # type: ignore[union-attr]
        assert len(offloaded._store._rates.copies_in._copies) <= 2 * LENGTH
        for _ in range(10):
            saved(offloaded)
            torch.cuda.synchronize()
        assert len(offloaded._store._rates.copies_out._copies) <= 2 * LENGTH
        choose_first(offloaded)
        kept = saved(offloaded)  # a graph that lives on
        for _ in range(10):
            assert_right(*saved(offloaded))
        assert len(offloaded._store.writes._cached) <= 2 * LENGTH
        assert_right(*kept)


def test_cached_ones_stay_within_storage_bytes(tmp_path: Path) -> None:
    """What the pool has to write does not exceed the room on storage."""
    with opened(tmp_path, everything(host_bytes=LENGTH * NBYTES, storage_bytes=4 * NBYTES)) as offloaded:
        choose_first(offloaded)
        graphs = []
        for _ in range(3):
            graphs.append(saved(offloaded))
            torch.cuda.synchronize()
            finish_writes_of_pool(offloaded)
            assert offloaded.storage_bytes <= 4 * NBYTES
        for graph in graphs:
            assert_right(*graph)


def test_nothing_stays_cached_with_a_budget(tmp_path: Path) -> None:
    """The pool counts towards the budget, so that what is evicted is written."""
    with opened(tmp_path, everything(host_bytes=8 * NBYTES, budget_bytes=8 * NBYTES)) as offloaded:
        choose_first(offloaded)
        finish_writes_of_pool(offloaded)
        before = offloaded.traffic()
        x, loss = saved(offloaded)
        finish_writes_of_pool(offloaded)
        after = offloaded.traffic()
        assert after.written_bytes - before.written_bytes == after.offloaded_bytes - before.offloaded_bytes > 0
        assert_right(x, loss)


def test_used_graphs_that_are_retained_make_room(tmp_path: Path) -> None:
    """Entries that backward has used make room in the pool as others do, if their graph lives on."""
    with opened(tmp_path, everything(host_bytes=LENGTH * NBYTES)) as offloaded:
        choose_first(offloaded)
        x, loss = saved(offloaded)
        (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
        for _ in range(10):
            torch.cuda.synchronize()
            finish_writes_of_pool(offloaded)
            before = offloaded.traffic().kept_for_room_bytes
            assert_right(*saved(offloaded))
            torch.cuda.synchronize()
            # The first ones may find the pool full of entries that are still to be written.
            if offloaded.traffic().kept_for_room_bytes == before:
                break
        else:
            pytest.fail("every forward found the pool full")
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


class Point:
    """A point that the device reaches when the host waits for it."""

    def __init__(self) -> None:
        self.was_waited_for = False

    def done(self) -> bool:
        return self.was_waited_for

    def synchronize(self) -> None:
        self.was_waited_for = True


def test_the_host_lets_the_device_catch_up(tmp_path: Path) -> None:
    """It waits until little is still to be computed. What is not computed yet says nothing about copies."""
    with opened(tmp_path, everything(host_bytes=LENGTH * NBYTES)) as offloaded:
        copies = offloaded._store.devices.copies_of(torch.device("cuda", 0))
        assert copies is not None
        computed, copied = [Point() for _ in range(4)], [Point() for _ in range(6)]
        for point in computed:
            copies._computed.add([point], 2)  # type: ignore[list-item]
        for point in copied:
            copies._copied.add([point], 1)  # type: ignore[list-item]
        assert copies.may_copy_out(1, most=5)
        assert [point.was_waited_for for point in computed] == [True, True, False, False]
        for point in copied[:3]:
            copies._copied.add([point], 2)  # type: ignore[list-item]
        assert not copies.may_copy_out(1, most=5)
        assert not any(point.was_waited_for for point in copied)
        for point in copied:
            point.synchronize()
        assert copies.may_copy_out(1, most=5)


# ---- hooks

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


@pytest.fixture
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
    """Without a batch, the sizes of two forwards cannot be compared, so neither can their times."""
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
def test_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, captured: bool) -> None:
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
