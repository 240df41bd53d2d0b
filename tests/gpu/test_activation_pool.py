"""Tensors are evicted from a device into the pool, and only those for which it has no room are written to storage.

Hooks are left out where they make steps longer, since the device waits for the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations
from lightning_smartinfinity.activations.tuning import hooks, tuner
from lightning_smartinfinity.activations.tuning.choice import Choice, Profile
from tests.activations import chains
from tests.activations.chains import assert_nothing_is_left, chain
from tests.activations.models import everything, opened
from tests.activations.test_programs import program, traffic_of
from tests.helpers.runif import RunIf

pytestmark = [RunIf(cuda_devices=1), pytest.mark.usefixtures("on_the_device")]

NUMEL = 1 << 16
NBYTES = 4 * NUMEL
LENGTH = 24
saved, assert_right = partial(chains.saved, length=LENGTH, numel=NUMEL), partial(chains.assert_right, length=LENGTH)


def run(
    offloaded: OffloadedActivations,
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> tuple[bool, torch.Tensor]:
    """Return whether a forward has hooks, and its loss."""
    with offloaded.forward(x):
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None, function(x)


def profiles_of(monkeypatch: pytest.MonkeyPatch, *, kept: int) -> list[Profile]:
    """Offload all but ``kept`` entries, whatever is measured, and return a list that gets the profiles."""
    profiles: list[Profile] = []
    costs = {"offloaded_bytes": 0, "kept_bytes": 0, "seconds": 0.0, "stall_seconds": 0.0, "peak_bytes": 0}

    def choose(profile: Profile, **_: object) -> Choice:
        profiles.append(profile)
        return Choice(num_offloaded=max(0, len(profile.sizes) - kept), **costs)  # type: ignore[arg-type]

    monkeypatch.setattr(tuner, "choose", choose)
    return profiles


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
    return chain(x, 40)


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


# The emulated device has no recurrent layers, and no complex numbers.
PROGRAMS = [seed for seed in range(30) if not {"recurrent", "complex"} & dict(program(seed).layers).keys()]


@pytest.mark.parametrize("seed", PROGRAMS)
@pytest.mark.filterwarnings("ignore:None of the inputs", "ignore:.*is not kept")
def test_a_program_gives_the_same_bits(tmp_path: Path, seed: int) -> None:
    """Losses, gradients, parameters and buffers of random trainings stay the same, and no memory stays allocated."""
    traffic_of(program(seed), tmp_path)


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
        assert_nothing_is_left(offloaded)  # writes of the last of them may still be in progress
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
    """Return the most bytes of the device that the third of some steps holds, with those that copies still use."""
    for _ in range(2):
        step()
        torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    step()
    most: int = torch.cuda.memory_stats()["active_bytes.all.peak"]
    return most - before


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
) -> list[bool]:
    """Return whether each step has hooks."""
    had = []
    for _ in range(num_steps):
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


@pytest.mark.usefixtures("all_but_one")
def test_peaks_that_somebody_resets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The most that the device has held is remembered, as loggers forget it."""
    most = 1 << 40
    peaks = itertools.chain([most], itertools.repeat(0))
    room_on_the_device(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: most)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    with opened(tmp_path, AUTO) as offloaded:
        assert all(trained(offloaded, clock, 6, with_hooks=DEAR))


@pytest.mark.usefixtures("all_but_one")
def test_a_forward_that_fails_is_no_step(tmp_path: Path, clock: Clock) -> None:
    """It is not taken for a fast step without hooks."""

    def failing(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("everything stays on the device")

    with opened(tmp_path, AUTO) as offloaded:
        assert not trained(offloaded, clock, 5, with_hooks=CHEAP)[-1]
        with pytest.raises(torch.OutOfMemoryError):
            run(offloaded, failing, tiny())
        assert trained(offloaded, clock, 4, with_hooks=CHEAP)[-1]


def test_a_captured_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The host does not wait for the device, which would make a capture fail."""
    with opened(tmp_path, AUTO) as offloaded:
        for _ in range(3):  # torch.cuda.graph wants some before
            run(offloaded, tiny_chain, tiny())[1].backward()
        monkeypatch.setattr(offloaded._store.devices, "wait", lambda: pytest.fail("a wait"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        run(offloaded, tiny_chain, tiny())


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
