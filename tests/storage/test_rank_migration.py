"""A training that goes on in stores of other ranks has one whole set of stores at any time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
from lightning_smartinfinity.storage.jobs.archiving import Plan, plan_making_way, plan_putting_together
from lightning_smartinfinity.storage.jobs.mover import Mover
from lightning_smartinfinity.storage.jobs.trainings import jobs_beside, movers_of, trainings_in
from lightning_smartinfinity.storage.state.parts import find_parts
from tests.storage.makers import commit_generation, create
from tests.storage.test_archiving import ARCHIVE, JOB, archive, carry_out, leave, steps_in, whole

OLD, NEW = 2, 3  # numbers of ranks
SUCCESSOR = bytes(range(16))


def way(folders: Sequence[Path]) -> Plan:
    """Return the plan by which the training of the old ranks makes way for the new ones."""
    seen = [find_parts(folders, [JOB, ARCHIVE])] * NEW
    (training,) = trainings_in(movers_of(seen), JOB)
    return plan_making_way(seen, job=JOB, training=training, successor=SUCCESSOR)


def fill(folders: Sequence[Path], *, created: int = NEW, recorded: int = NEW) -> None:
    """Leave stores of the new ranks, of which so many were made and so many are whole."""
    for rank in range(created):
        store = create(folders, rank=rank, world_size=NEW, job_id=SUCCESSOR)
        if rank < recorded:
            commit_generation(store, 0)
            store.record_training(generation=0, step=7, content=b"", has_steps=True)
        store.close(remove=False)


def resume(folders: Sequence[Path], *, ranks: int) -> None:
    """Do what a training of so many ranks does before it resumes."""
    carry_out(plan_putting_together([find_parts(folders, jobs_beside(JOB))] * ranks, job=JOB), ranks=ranks)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Return two storage folders with a training of the old ranks."""
    found = [tmp_path / "a", tmp_path / "b"]
    leave(found, step=7, ranks=OLD)
    return found


@pytest.mark.parametrize("ranks", [1, OLD, NEW])
@pytest.mark.parametrize(("created", "recorded"), [(0, 0), (1, 0), (NEW, 0), (NEW, NEW - 1)])
def test_a_kill_before_the_new_stores_are_whole(created: int, recorded: int, ranks: int, folders: list[Path]) -> None:
    """What there is of them is deleted, and the old stores are moved back, whoever resumes."""
    carry_out(way(folders), ranks=NEW)
    fill(folders, created=created, recorded=recorded)
    resume(folders, ranks=ranks)
    assert steps_in(folders, JOB) == whole(7, ranks=OLD, folders=2) and steps_in(folders) == {}


@pytest.mark.parametrize("way_back", [False, True])
def test_a_kill_while_the_old_stores_move(way_back: bool, folders: list[Path]) -> None:
    """They are moved back together, on the way there and on the way back."""
    plan = way(folders)
    if way_back:
        carry_out(plan, ranks=NEW)
        fill(folders, recorded=0)
        plan = plan_putting_together([find_parts(folders, jobs_beside(JOB))] * NEW, job=JOB)
    with ExitStack() as opened:
        movers = [opened.enter_context(closing(Mover(plan, rank=rank))) for rank in range(NEW)]
        for stage in (Mover.claim, Mover.make_room) if way_back else (Mover.claim,):
            for mover in movers:
                stage(mover)
        movers[0 if way_back else 1].move()
    assert len(steps_in(folders)) == len(steps_in(folders, JOB)) == 2
    resume(folders, ranks=1)
    assert steps_in(folders, JOB) == whole(7, ranks=OLD, folders=2) and steps_in(folders) == {}


def test_the_old_stores_go_when_the_new_ones_are_whole(folders: list[Path]) -> None:
    """A kill while they are deleted leaves nothing that the next start does not delete."""
    carry_out(way(folders), ranks=NEW)
    fill(folders)
    half_gone = RankFolder(folders[0] / ARCHIVE / "rank-00000", create=False)
    half_gone.disown()
    half_gone.close(remove=False)
    RankFolder(folders[1] / ARCHIVE / "rank-00001", create=False).destroy()
    resume(folders, ranks=NEW)
    assert steps_in(folders, JOB) == whole(7, ranks=NEW, folders=2)
    assert not any((folder / ARCHIVE).exists() for folder in folders)


def test_another_training_in_the_way_is_not_deleted(folders: list[Path]) -> None:
    """If a new training was begun in between, nothing moves, by whichever of the two names a training resumes."""
    carry_out(way(folders), ranks=NEW)
    leave(folders, step=0, has_steps=False)
    for job in (JOB, ARCHIVE):
        assert not plan_putting_together([find_parts(folders, jobs_beside(job))], job=job).changes_something


def test_a_training_that_is_archived_later_is_no_source(folders: list[Path]) -> None:
    """The note of the successor goes when the training has gone on, so that nothing else is deleted for it."""
    carry_out(way(folders), ranks=NEW)
    resume(folders, ranks=1)
    assert {part.successor for part in find_parts(folders, [JOB])} == {SUCCESSOR}
    for rank in range(OLD):
        recover_store(folders, rank=rank, training=1, run=os.urandom(16)).close(remove=False)
    assert {part.successor for part in find_parts(folders, [JOB])} == {None}
    archive(folders)
    assert {part.successor for part in find_parts(folders, [ARCHIVE])} == {None}


def test_copies_count_once(tmp_path: Path) -> None:
    """A training in the folders that were named comes before the one that it was copied from."""
    leave([tmp_path / "a"], step=7)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert [part.storage for part in find_parts([tmp_path / "b"], [JOB])] == [tmp_path / "b"]
