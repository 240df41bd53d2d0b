"""The staging buffer for partitions outside host memory: its contents, its size and its reuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.native import Batch
from lightning_smartinfinity.pipeline.parameters.partitions import TensorPartition
from tests.helpers.native_testing import inject
from tests.helpers.waiting import LIMIT, await_that
from tests.pipeline.harness import Case, assert_equal, running

# There are more tasklets than rows, so that each row is used again.
SMALL_RING = Case(staged=True, num_buffers=2, shapes=((60_000, 0, 0, 0), (3, 0, 1, 0), (50_000, 3, 1, 1)))


def test_the_update_goes_on_by_itself(tmp_path: Path) -> None:
    """All tasklets are updated and in the partition though nobody waits for any of them.

    Masters in fp32 come from storage: the partition is overwritten and never read.
    """
    case = SMALL_RING.but(all_active=True)
    with running(tmp_path / "straight", case) as run:
        run.step(1)
        expected = run.state()["partition"]
    with running(tmp_path / "staged", case) as run:
        plan = run.collect(1)
        for tensor in run.partition:
            tensor.fill_(torch.nan)
        run.handler.begin_step(plan)
        await_that(lambda: torch.equal(torch.cat(run.partition), expected), seconds=30)
        run.handler.commit()


def test_what_is_waited_for_goes_first(tmp_path: Path) -> None:
    """A tasklet that is waited for is submitted before those that have no row yet."""
    shapes = ((60_000, 0, 0, 0), (50_000, 0, 0, 0))
    with running(tmp_path, SMALL_RING.but(shapes=shapes)) as run:
        given: set[int] = set()

        def noting(call: Callable[[Batch], None]) -> Callable[[Batch], None]:
            def noted(batch: Batch) -> None:
                given.update(tasklet.index for tasklet in batch.tasklets)
                call(batch)

            return noted

        run.device.submit = noting(run.device.submit)  # type: ignore[method-assign]
        run.device.extend = noting(run.device.extend)  # type: ignore[method-assign]
        inject(run.device.pipeline, max_delay_us=20_000, seed=1)
        run.handler.begin_step(run.collect(1))
        run.handler.step.wait([1])
        assert given >= set(run.layout.tasklets_of(slice(1, 2)))
        assert len(given) < len(run.layout.tasklets)
        run.handler.commit()


class FullPartition(TensorPartition):
    """A partition on a full disk, or one that has a bug."""

    error: ClassVar[BaseException] = StorageError("The disk is full.", "Free space.")

    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        if offset > 20_000:
            raise self.error
        super().put(sub_group, offset, values)


@pytest.mark.parametrize("error", [FullPartition.error, MemoryError("a bug")], ids=["storage", "bug"])
def test_parameters_that_cannot_be_put(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits next gets the error, or one of ours for it, and the step can be rolled back and repeated."""
    monkeypatch.setattr(FullPartition, "error", error)
    with running(tmp_path, SMALL_RING) as run:
        before, plan = run.state(), run.collect(1)
        full = replace(plan, outputs=FullPartition(run.partition))
        run.handler.begin_step(full)
        with pytest.raises(StorageError) as caught:
            run.handler.step.wait()
        assert error in (caught.value, caught.value.__cause__)
        with pytest.raises(StorageError):
            run.handler.commit()
        monkeypatch.setattr(FullPartition, "put", TensorPartition.put)
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.step(1)


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails by an error of ours that says what to do, and can be repeated."""

    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with running(tmp_path, SMALL_RING) as run:
        before, plan = run.state(), run.collect(1)
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", refuse)
            with pytest.raises(StorageError, match="ulimit -u"):
                run.handler.begin_step(plan)
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.step(1)


@pytest.mark.parametrize("end", ["commit", "roll_back"])
def test_threads_end_with_their_steps(tmp_path: Path, end: str) -> None:
    """After a step has ended, none of its threads is left, and further calls return at once."""
    with running(tmp_path, SMALL_RING) as run:
        run.handler.begin_step(run.collect(1))
        step = run.handler.step
        for _ in range(3):
            (run.handler.finish if end == "commit" else step.stop)()
        if end == "commit":
            step.wait()
        getattr(run.handler, end)()
        await_that(lambda: not of_staging(), seconds=5)


def of_staging() -> list[Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "smart-infinity-staging"]


def test_a_wait_that_cannot_be_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device refuses to prefer what is waited for, who waits gets the error."""
    refused = threading.Event()
    with running(tmp_path, SMALL_RING) as run:
        before, plan = run.state(), run.collect(1)
        inject(run.device.pipeline, max_delay_us=50_000, seed=1)
        monkeypatch.setattr(run.device, "prefer", Mock(side_effect=MemoryError("no room")))
        run.handler.begin_step(plan)

        def wait() -> None:
            with pytest.raises(StorageError):
                run.handler.step.wait()
            refused.set()

        Thread(target=wait, daemon=True).start()
        assert refused.wait(LIMIT)
        run.handler.roll_back()
        assert_equal(run.state(), before)


def test_a_thread_whose_start_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that begins after its step was stopped leaves the partition to the rollback's thread."""
    late: list[Thread] = []
    let_go, synchronizing = threading.Event(), set()
    start, begin = Thread.start, Thread._bootstrap_inner  # type: ignore[attr-defined]

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    def interrupted_start(thread: Thread) -> None:
        late.append(thread)
        monkeypatch.setattr(Thread, "start", start)
        thread._started.wait = interrupted  # type: ignore[attr-defined]
        start(thread)

    def begin_late(thread: Thread) -> None:
        if thread in late:
            let_go.wait(LIMIT)
        begin(thread)

    monkeypatch.setattr(Thread, "_bootstrap_inner", begin_late)
    monkeypatch.setattr(TensorPartition, "synchronize", lambda partition: synchronizing.add(threading.current_thread()))
    with running(tmp_path, SMALL_RING) as run:
        before, plan = run.state(), run.collect(1)
        monkeypatch.setattr(Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            run.handler.begin_step(plan)
        run.handler.roll_back()
        let_go.set()
        await_that(lambda: not of_staging(), seconds=30)
        assert not synchronizing.intersection(late)
        assert_equal(run.state(), before)
