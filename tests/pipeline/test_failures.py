"""Failed and stopped steps: their errors, and the steps after them. test_programs.py compares every bit.

A test of which nothing else is known begins with a store after one step.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest

from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageFullError
from tests.helpers.attacks import Attack
from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run, assert_equal, running


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that has done its first step."""
    with running(tmp_path, Case()) as run:
        run.step(1)
        yield run


@contextmanager
def failing_elsewhere() -> Iterator[None]:
    """Fail on another rank after this one has committed."""
    yield
    raise StorageFullError("Writing the commit record of another rank failed.", "Free space.")


@contextmanager
def interrupted_elsewhere() -> Iterator[None]:
    """Interrupt the agreement of the ranks after this one has committed."""
    yield
    raise KeyboardInterrupt


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
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.handler.begin_step(plan)
        run.handler.commit()
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
        run.handler.roll_back()
        assert_equal(run.state(), before)


@pytest.mark.parametrize("committed", [False, True])
def test_one_place_cannot_roll_back(tmp_path: Path, committed: bool) -> None:
    """With durability none rollback is refused, committed here or not. The error says why and names the alternative."""
    with running(tmp_path, Case(durability="none")) as run:
        assert not run.handler.can_roll_back
        run.handler.begin_step(run.collect(1))
        if committed:
            with pytest.raises(StorageFullError, match="another rank"):
                run.handler.commit(together=failing_elsewhere)
        with pytest.raises(StorageError, match="durability='none'") as caught:
            run.handler.roll_back()
        assert "durability='step'" in caught.value.remedy


def test_a_commit_record_that_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the commit record cannot be written, the step rolls back, and succeeds once the disk has recovered."""
    before, plan = run.state(), run.collect(2)
    answers = chain([OSError(errno.ENOSPC, "No space left on device")], repeat(DEFAULT))
    monkeypatch.setattr(os, "pwrite", Mock(wraps=os.pwrite, side_effect=answers))
    run.handler.begin_step(plan)
    with pytest.raises(StorageFullError, match=r"commit\.bin"):
        run.handler.commit()
    run.handler.roll_back()
    assert_equal(run.state(), before)
    run.handler.begin_step(plan)
    run.handler.commit()
    assert run.handler.generation == 2


def test_a_commit_record_in_doubt_ends_training(run: Run) -> None:
    """No step may begin after a record that could be neither written nor erased: it may reappear after a crash."""
    before = run.state()
    run.handler.begin_step(run.collect(2))
    (run.folders[0] / "default" / "rank-00000" / "commit.bin").unlink()
    with pytest.raises(StorageError, match=r"commit\.bin"):
        run.handler.commit()
    run.handler.roll_back()
    assert_equal(run.state(), before)
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
        run.handler.commit(together=interrupted_elsewhere)
    assert run.handler.in_flight and run.handler.generation == 2
    if goes_on:
        run.handler.commit()
        assert not run.handler.in_flight and run.handler.generation == 2
        return
    with pytest.raises(StorageFullError, match="another rank"):
        run.handler.commit(together=failing_elsewhere)
    run.handler.roll_back()
    assert run.handler.generation == 1
    assert_equal(run.state(), before)


# ---- state that is not what was written


def flip_bit(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("offset_in_extent", [100, 16_384 + 9, 32_768 + 4_000, 49_152 + 4_095])
def test_a_flipped_bit_is_found(run: Run, offset_in_extent: int, attack: Attack) -> None:
    """A flipped bit of master, exp_avg, exp_avg_sq or trailer is reported with path and remedy."""
    attack("bit flip in state on storage", tries=1, outcome="StorageCorruptError with path and offset")
    place = run.layout.extents.place_offset(int(run.store.placement.positions[2]))
    flip_bit(Path(run.store.files[0].path), place + offset_in_extent)
    with pytest.raises(StorageCorruptError, match=r"tasklet 2 at offset \d+ of /.*state\.bin is refused") as caught:
        run.state()
    assert "checkpoint" in caught.value.remedy
    run.handler.begin_step(run.collect(3))
    if offset_in_extent == 100:  # a 32-true step reads the partition instead of the master
        run.handler.commit()
        return
    with pytest.raises(StorageCorruptError, match=r"tasklet 2 at offset \d+ of /.*state\.bin is refused"):
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
