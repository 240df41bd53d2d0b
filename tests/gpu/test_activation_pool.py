"""Tensors are evicted from a device into the pool, and only those for which it has no room are written to storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations
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
        throttle.bytes_per_second = 1e7
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
