"""Failed and stopped steps: their errors, and the steps after them. test_programs.py compares every bit.

A test of which nothing else is known begins with a store after one step.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from threading import Thread
from typing import ClassVar
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch

from lightning_smartinfinity import StorageCorruptError, StorageError, StorageFullError, TopK
from lightning_smartinfinity.native import Batch
from lightning_smartinfinity.pipeline import handler, step, step_batches
from lightning_smartinfinity.pipeline.gradients import compressed_gradients
from lightning_smartinfinity.pipeline.parameters import partitions, staged_submission, staging_buffer, submissions
from lightning_smartinfinity.pipeline.parameters.partitions import TensorPartition
from tests.helpers.assertions import refused
from tests.helpers.attacks import Attack
from tests.helpers.interrupts import Interrupt
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.helpers.waiting import LIMIT, await_that
from tests.native.stored import flip_bit
from tests.pipeline.harness import Case, Run, assert_equal, complete_tasklets, everything, failing_elsewhere, running


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that has done its first step."""
    with running(tmp_path, Case()) as run:
        run.step(1)
        yield run


FULL_ELSEWHERE = partial(
    failing_elsewhere, StorageFullError("Writing the record of another rank failed.", "Free space.")
)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"fail_write_at": 2, "errno": errno.ENOSPC}, StorageFullError),
        ({"fail_write_at": 3, "errno": errno.EIO}, StorageError),
        ({"fail_read_at": 3, "errno": errno.EIO}, StorageError),
    ],
    ids=["full", "write-error", "read-error"],
)
def test_a_failed_step(tmp_path: Path, faults: dict[str, int], kind: type[StorageError], staged: bool) -> None:
    """The error names path, offset and remedy, to everyone who waits. The step can then be done again."""
    with running(tmp_path, Case(staged=staged, num_buffers=2)) as run:
        before, plan = run.state(), run.collect(1)
        inject(run.device.pipeline, seed=1, **faults)
        run.handler.begin_step(plan)
        for wait in (run.handler.commit, run.handler.step.wait):
            with pytest.raises(kind, match=r"offset \d+ of /.*state\.bin \(tasklet \d") as caught:
                wait()
            assert type(caught.value) is kind and caught.value.remedy
        assert run.handler.generation == 0
        run.roll_back_to(before)
        run.update(plan)
        assert run.handler.traffic().steps == 1


def test_a_rollback_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    """A read error during the rollback is reported, and the next try restores the partition."""
    with running(tmp_path, Case()) as run:
        num_reads = run.handler.traffic().read_calls
        run.step(1)
        num_reads = run.handler.traffic().read_calls - num_reads
        before = run.state()
        inject(run.device.pipeline, fail_read_at=num_reads + 1)
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageError, match=r"state\.bin"):
            run.handler.roll_back()
        assert run.handler.in_flight
        run.roll_back_to(before)


@pytest.mark.parametrize("committed", [False, True])
def test_one_place_cannot_roll_back(tmp_path: Path, committed: bool) -> None:
    """With durability none rollback is refused, committed here or not. The error says why and names the alternative."""
    with running(tmp_path, Case(durability="none")) as run:
        assert not run.handler.can_roll_back
        run.handler.begin_step(run.collect(1))
        if committed:
            with pytest.raises(StorageFullError, match="another rank"):
                run.handler.commit(together=FULL_ELSEWHERE)
        with refused(StorageError, match="durability='none'", remedy="durability='step'"):
            run.handler.roll_back()


def test_a_commit_record_that_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the commit record cannot be written, the step rolls back, and succeeds once the disk has recovered."""
    before, plan = run.state(), run.collect(2)
    answers = chain([OSError(errno.ENOSPC, "No space left on device")], repeat(DEFAULT))
    monkeypatch.setattr(os, "pwrite", Mock(wraps=os.pwrite, side_effect=answers))
    run.handler.begin_step(plan)
    with pytest.raises(StorageFullError, match=r"commit\.bin"):
        run.handler.commit()
    run.roll_back_to(before)
    run.update(plan)
    assert run.handler.generation == 2


def test_a_commit_record_in_doubt_ends_training(run: Run) -> None:
    """No step may begin after a record that could be neither written nor erased: it may reappear after a crash."""
    before = run.state()
    run.handler.begin_step(run.collect(2))
    (run.folders[0] / "default" / "rank-00000" / "commit.bin").unlink()
    with pytest.raises(StorageError, match=r"commit\.bin"):
        run.handler.commit()
    run.roll_back_to(before)
    with pytest.raises(StorageError, match=r"commit\.bin"):
        run.handler.begin_step(run.collect(3))


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_step_whose_agreement_was_interrupted(run: Run, goes_on: bool) -> None:
    """It stays in flight. The next commit does not write a second generation.

    If another rank then fails, the step is rolled back although its record was written.
    """
    before = run.state()
    run.handler.begin_step(run.collect(2))
    with pytest.raises(KeyboardInterrupt):
        run.handler.commit(together=partial(failing_elsewhere, KeyboardInterrupt()))
    assert run.handler.in_flight and run.handler.generation == 2
    if goes_on:
        run.handler.commit()
        assert not run.handler.in_flight and run.handler.generation == 2
        return
    with pytest.raises(StorageFullError, match="another rank"):
        run.handler.commit(together=FULL_ELSEWHERE)
    run.handler.roll_back()
    assert run.handler.generation == 1
    assert_equal(run.state(), before)


# ---- state that is not what was written


@pytest.mark.parametrize("offset_in_extent", [100, 16_384 + 9, 32_768 + 4_000, 49_152 + 4_095])
def test_a_flipped_bit_is_found(run: Run, offset_in_extent: int, attack: Attack) -> None:
    """A flipped bit of master, exp_avg, exp_avg_sq or trailer is reported with path and remedy."""
    attack("bit flip in state on storage", tries=1, outcome="StorageCorruptError with path and offset")
    place = run.layout.extents.place_offset(int(run.store.placement.positions[2]))
    flip_bit(Path(run.store.files[0].path), place + offset_in_extent)
    told = r"tasklet 2 at offset \d+ of /.*state\.bin is refused"
    with refused(StorageCorruptError, match=told, remedy="checkpoint"):
        run.state()
    run.handler.begin_step(run.collect(3))
    if offset_in_extent == 100:  # a 32-true step reads the partition instead of the master
        run.handler.commit()
        return
    with pytest.raises(StorageCorruptError, match=told):
        run.handler.step.wait()


# ---- reads and changes of the whole state


def test_nothing_is_committed_before_all_is_written(run: Run) -> None:
    """The ranks agree after this one has written all of a changed state."""
    written: list[int] = []

    @contextmanager
    def counted() -> Iterator[None]:
        num_writes = run.handler.traffic().write_calls
        yield
        written.append(run.handler.traffic().write_calls - num_writes)

    run.handler.state.replace(lambda window: None, steps=np.zeros_like(run.handler.steps), together=counted)
    assert written == [run.layout.extents.num_tasklets]


# ---- Ctrl-C at any line of a step with compressed gradients, which is continued or repeated and counts nothing twice


MODULES = (
    compressed_gradients,
    handler,
    partitions,
    staged_submission,
    staging_buffer,
    step,
    step_batches,
    submissions,
)
COMPRESSED = Case(
    num_buffers=2,
    shapes=((9_000, 0, 0, 0), (6_000, 3, 1, 0), (7_000, 0, 0, 1)),
    compression=TopK(0.05),
)


@pytest.mark.parametrize(
    ("staged", "goes_on", "every"),
    long_but([(True, True, 3)], [(True, True, 3), (False, False, 1), (True, True, 1)]),
)
def test_on_every_line(tmp_path: Path, staged: bool, goes_on: bool, every: int) -> None:
    """After an interrupt on any line, parameters, state and residual are those of an undisturbed step.

    The form that always runs tries every third line.
    """
    case = COMPRESSED.but(staged=staged)
    with running(tmp_path / "interrupted", case) as run, running(tmp_path / "straight", case) as straight:
        number, came = 0, True
        while came:
            plan = run.collect(number)
            with suppress(KeyboardInterrupt), Interrupt(every * number, MODULES).coming():
                run.handler.begin_step(plan)
                run.handler.step.wait([0])
                run.handler.commit()
                came = False
            if came:
                finish(run, number, goes_on=goes_on)
            straight.step(number)
            assert_equal(in_memory(run), in_memory(straight))
            number += 1
        assert every * number > 100
        assert_equal(run.state(), straight.state())


def test_opening_tasklets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If extend() is interrupted, the device's tasklets are unknown, so the step is rolled back and repeated."""
    with running(tmp_path / "interrupted", COMPRESSED) as run, running(tmp_path / "straight", COMPRESSED) as straight:
        plan = run.collect(1)
        run.handler.begin_incremental(everything(plan))
        with monkeypatch.context() as patch:
            patch.setattr(run.device, "submit", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run.handler.step.extend(complete_tasklets(run, plan)[:1])
        assert not run.handler.step.complete(plan)
        run.handler.roll_back()
        run.step(1)
        straight.step(1)
        assert_equal(in_memory(run), in_memory(straight))
        assert_equal(run.state(), straight.state())


def finish(run: Run, step: int, *, goes_on: bool) -> None:
    if run.handler.in_flight and goes_on:
        # The commit fails if it is unknown whether the device received all tasklets.
        with suppress(StorageError):
            run.handler.commit()
    if run.handler.in_flight:
        run.handler.roll_back()
    if run.handler.generation == step:  # still the generation before the step
        run.step(step)


def in_memory(run: Run) -> dict[str, torch.Tensor]:
    assert run.compressed is not None and run.compressed.residual is not None
    return {"partition": torch.cat(run.partition), "residual": run.compressed.residual}


# ---- the staging buffer for partitions outside host memory: its contents, its size and its reuse


# There are more tasklets than rows, so that each row is used again.
SMALL_RING = Case(staged=True, num_buffers=2, shapes=((60_000, 0, 0, 0), (3, 0, 1, 0), (50_000, 3, 1, 1)))


def test_the_update_goes_on_by_itself(tmp_path: Path) -> None:
    """All tasklets are updated in the partition, although no code waits for any of them.

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
    with running(tmp_path, SMALL_RING.but(shapes=((60_000, 0, 0, 0), (50_000, 0, 0, 0)))) as run:
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
        assert given >= set(run.layout.tasklets_of(slice(1, 2))) and len(given) < len(run.layout.tasklets)
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
    """The next wait raises the error, or one of ours for it, and the step can be rolled back and repeated."""
    monkeypatch.setattr(FullPartition, "error", error)
    with running(tmp_path, SMALL_RING) as run:
        before, plan = run.state(), run.collect(1)
        run.handler.begin_step(replace(plan, outputs=FullPartition(run.partition)))
        with pytest.raises(StorageError) as caught:
            run.handler.step.wait()
        assert error in (caught.value, caught.value.__cause__)
        with pytest.raises(StorageError):
            run.handler.commit()
        monkeypatch.setattr(FullPartition, "put", TensorPartition.put)
        run.roll_back_to(before)
        run.step(1)


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails by an error of ours that says what to do, and can be repeated."""
    with running(tmp_path, SMALL_RING) as run:
        before, plan = run.state(), run.collect(1)
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(StorageError, match="ulimit -u"):
                run.handler.begin_step(plan)
        run.roll_back_to(before)
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
        run.roll_back_to(before)


def test_a_thread_whose_start_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that begins after its step was stopped leaves the partition to the rollback's thread."""
    late: list[Thread] = []
    let_go, synchronizing = threading.Event(), set()
    start, begin = Thread.start, Thread._bootstrap_inner  # type: ignore[attr-defined]

    def interrupted_start(thread: Thread) -> None:
        late.append(thread)
        monkeypatch.setattr(Thread, "start", start)
        thread._started.wait = Mock(side_effect=KeyboardInterrupt)  # type: ignore[attr-defined]
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
