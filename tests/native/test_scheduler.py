"""Pipelines and tensor stores take turns at the scheduler of their device."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.integrations import session
from lightning_smartinfinity.native import (
    Batch,
    HostBuffer,
    IoClass,
    IoScheduler,
    Operation,
    StateFile,
    TensorStore,
    ask_to_end,
)
from lightning_smartinfinity.storage.io import scheduling
from tests.helpers.golden import adam_step
from tests.helpers.native_testing import Hold, inject
from tests.helpers.waiting import LIMIT, await_that, lenient
from tests.native.stored import Run, StoredState, extent_bytes
from tests.native.test_deadlines import interrupted
from tests.native.test_pipeline import assert_same, expected_update, initial, normals

TASKLET = 1024
EXTENT = extent_bytes(TASKLET)
# Longer than a test may take, so that only ask_to_end() can end a wait.
ENDLESS = round(1000 * 10 * LIMIT)


class Neighbour:
    """A tensor store on the same device, whose first write uses up all that may be in flight."""

    def __init__(self, folder: Path, scheduler: IoScheduler, *, timeout_ms: int | None = None) -> None:
        path = folder / "tensors"
        path.touch()
        file = StateFile(str(path), direct=False, scheduler=scheduler)
        self.store = TensorStore([file], timeout_ms=timeout_ms)
        self._memory = HostBuffer(2 * EXTENT)

    def write(self, nbytes: int, io_class: IoClass = IoClass.AWAITED) -> int:
        extent = self.store.allocate(nbytes)
        return self.store.write(extent, offset=0, address=self._memory.address, nbytes=nbytes, io_class=io_class)


@contextmanager
def neighbours(
    folder: Path, *, num_tasklets: int = 2, timeout_ms: int | None = None
) -> Iterator[tuple[StoredState, Neighbour]]:
    """Make a state and a tensor store, of which two extents may be in flight together, and one while one is held."""
    scheduler = IoScheduler(in_flight_bytes=2 * EXTENT)
    state = StoredState(
        folder, num_tasklets * TASKLET, TASKLET, scheduler=scheduler, options={"timeout_ms": timeout_ms}
    )
    with state:
        state.write(*initial(state.numel))
        neighbour = Neighbour(folder, scheduler, timeout_ms=timeout_ms)
        yield state, neighbour
        neighbour.store.close()


def waits_of(state: StoredState) -> dict[tuple[str, str], tuple[int, int]]:
    assert state.scheduler is not None
    return {(who, whom): (requests, nbytes) for who, whom, requests, nbytes, _ in state.scheduler.waits()}


@pytest.mark.parametrize(
    ("asks_by", "io_class"),
    [("nobody", IoClass.STATE), ("preferring", IoClass.BACKGROUND), ("waiting", IoClass.STATE)],
)
def test_what_somebody_needs_is_read_first(tmp_path: Path, asks_by: str, io_class: IoClass) -> None:
    """A read that waits for its turn overtakes others of its pipeline once its tasklet is needed."""
    with neighbours(tmp_path) as (state, neighbour):
        first, second = Hold(neighbour.store, write_at=0), Hold(neighbour.store, write_at=1)
        neighbour.write(EXTENT), neighbour.write(EXTENT)
        await_that(lambda: first.count + second.count == 2)
        found = tuple(np.zeros(state.numel, np.float32) for _ in range(3))
        tasklets = state.tasklets([Run(0, state.numel, arrays=found)])
        state.pipeline.submit(Batch(Operation.READ, tasklets, io_class=io_class))
        if asks_by == "preferring":
            state.pipeline.prefer([1])
        elif asks_by == "waiting":
            with interrupted():
                state.pipeline.wait_for([1])
        first.release()  # from now on one extent may be in flight
        assert state.pipeline.finish() is None
        second.release()
        name = io_class.name.lower()
        if asks_by == "nobody":
            assert waits_of(state) == {(name, "awaited"): (2, 2 * EXTENT), (name, name): (1, EXTENT)}
        else:
            assert waits_of(state) == {
                ("gather", "awaited"): (1, EXTENT),
                (name, "awaited"): (1, EXTENT),
                (name, "gather"): (1, EXTENT),
            }
        assert_same(found, initial(state.numel))


@pytest.mark.parametrize(("num_processes", "num_buffers", "widened"), [(1, 4, 4), (2, 8, 4)])
def test_a_ring_never_waits_for_itself(tmp_path: Path, num_processes: int, num_buffers: int, widened: int) -> None:
    """The bytes of a ring may be in flight together while its pipeline is open, however few are meant to be.

    A process of several has its part of the device's bytes, and of its ring's, and no more.
    """
    scheduler = IoScheduler(in_flight_bytes=4096 * num_processes, num_processes=num_processes)
    assert scheduler.in_flight_bytes == 4096
    options = {"num_buffers": num_buffers}
    with StoredState(tmp_path, 16 * TASKLET, TASKLET, scheduler=scheduler, options=options) as state:
        assert scheduler.in_flight_bytes == widened * EXTENT
        state.write(*initial(state.numel))
        assert_same(state.read(), initial(state.numel))
        other = state.open_pipeline()
        state.pipeline.close()
        assert scheduler.in_flight_bytes == widened * EXTENT
        other.close()
        assert scheduler.in_flight_bytes == 4096
        assert num_processes > 1 or scheduler.waits() == []


@pytest.mark.parametrize("end", ["it is done", "it fails", "it is cancelled", "it is not answered"])
def test_requests_go_on_whatever_becomes_of_those_before(tmp_path: Path, end: str) -> None:
    """An update that waits for another user's request begins when that has ended in any way, with the same bits."""
    seconds = lenient()
    with neighbours(tmp_path, num_tasklets=5, timeout_ms=round(1000 * seconds)) as (state, neighbour):
        arrays = initial(state.numel)
        inject(state.pipeline, seed=1, max_delay_us=500, short_transfer_every=2)
        if end == "it fails":
            inject(neighbour.store, fail_write_at=0, errno=errno.EIO)
        hold = Hold(neighbour.store, write_at=0)
        begun = neighbour.write(2 * EXTENT)
        waiting = neighbour.write(2 * EXTENT)
        gradient, parameter = normals(9, state.numel), arrays[0].copy()
        runs = [Run(0, state.numel, 0, gradient, parameter=parameter)]
        state.start(Operation.UPDATE, runs, [adam_step()])
        if end == "it is cancelled":
            assert neighbour.store.cancel(waiting) and not neighbour.store.cancel(begun)
        if end != "it is not answered":
            hold.release()
        assert state.finish() is None
        failure = neighbour.store.wait(begun)
        assert (failure.kind if failure else None) == {"it fails": "io", "it is not answered": "timeout"}.get(end)
        hold.release()
        await_that(lambda: not neighbour.store.busy)
        arrays = expected_update(arrays, gradient, runs)
        assert_same((parameter,), arrays[:1])
        assert_same(state.read(), arrays)


def test_a_device_that_answers_nobody_is_given_up_by_all(tmp_path: Path) -> None:
    """What waits for its turn behind requests that do not return is given up soon after them, one after the other."""
    scheduler = IoScheduler(in_flight_bytes=2 * EXTENT)
    with ExitStack() as opened:
        states, holds = [], []
        for number in range(5):
            folder = tmp_path / str(number)
            folder.mkdir()
            options = {"timeout_ms": ENDLESS}
            states.append(StoredState(folder, 2 * TASKLET, TASKLET, scheduler=scheduler, options=options))
            opened.enter_context(states[-1])
            states[-1].write(*initial(states[-1].numel))
        for state in states:
            holds.append(Hold(state.pipeline, read_at=0, count=2))
            state.start(Operation.READ, [Run(0, state.numel)])
        # Three seconds for each of them would be more than those for which limits are short.
        ask_to_end()
        failures = [state.pipeline.finish() for state in states]
        assert [failure and failure.kind for failure in failures] == ["timeout"] * len(states)
        for hold in holds:
            hold.release()
        await_that(lambda: not any(state.pipeline.busy for state in states))


@pytest.mark.parametrize("num_processes", [1, 4])
def test_the_ranks_of_a_machine_share_a_device(
    tmp_path: Path, num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an equal part of what one process alone may have in flight."""
    monkeypatch.setattr(scheduling, "_schedulers", {})
    monkeypatch.setattr(scheduling, "_num_processes", 1)
    monkeypatch.setattr(session, "prepare_environment", lambda device_type, *, local_world_size: None)
    strategy = SmartInfinityStrategy(tmp_path / "storage")
    strategy._prepare_environment(torch.device("cpu"), local_world_size=num_processes)
    with (tmp_path / "file").open("w") as file:
        part = scheduling.scheduler_of(file.fileno()).in_flight_bytes
    assert part * num_processes == IoScheduler().in_flight_bytes
