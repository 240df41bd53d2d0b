"""A new training moves interrupted ones out of its way as a whole, and archives at most one of each job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.errors import StorageError, StorageFullError, StorageLockedError
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.jobs.archiving import Plan, plan_archiving, plan_putting_together
from lightning_smartinfinity.storage.jobs.mover import Mover
from lightning_smartinfinity.storage.jobs.trainings import jobs_beside
from lightning_smartinfinity.storage.state.parts import Part, find_parts
from lightning_smartinfinity.storage.state.space import (
    leftover_bytes,
    measure_parts,
    measure_space,
    require_space,
)
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.storage.makers import commit_generation, create, extents

JOB, ARCHIVE = "default", "default.aside"


def leave(folders: Sequence[Path], *, step: int, ranks: int = 1, job: str = JOB, has_steps: bool = True) -> None:
    """Leave the stores of a training that was interrupted after a step."""
    store_id = os.urandom(16)
    stores = [create(folders, rank=rank, world_size=ranks, job=job, job_id=store_id) for rank in range(ranks)]
    for store in stores:
        commit_generation(store, 0)
        store.record_training(generation=0, step=step, content=b"", has_steps=has_steps)
        store.close(remove=False)


def go_on(folders: Sequence[Path], *, step: int, ranks: int = 1, job: str = ARCHIVE) -> None:
    """Resume a training and interrupt it after a further step."""
    for rank in range(ranks):
        store = recover_store(folders, job=job, rank=rank, training=1, run=bytes(16))
        store.record_training(generation=0, step=step, content=b"", has_steps=True)
        store.close(remove=False)


def carry_out(plan: Plan, *, ranks: int = 1) -> None:
    """Do what all ranks do together."""
    with ExitStack() as opened:
        movers = [opened.enter_context(closing(Mover(plan, rank=rank))) for rank in range(ranks)]
        for stage in (Mover.claim, Mover.make_room, Mover.move):
            for mover in movers:
                stage(mover)


def archive(folders: Sequence[Path], *, ranks: int = 1) -> Plan:
    """Make way for a training of so many ranks in these folders."""
    seen = [find_parts(folders, [JOB, ARCHIVE])] * ranks
    plan = plan_archiving(seen, job=JOB, folders=[folders] * ranks)
    carry_out(plan, ranks=ranks)
    return plan


def put_together(folders: Sequence[Path], *, job: str, ranks: int = 1) -> None:
    """Do what a training does before it resumes."""
    carry_out(plan_putting_together([find_parts(folders, jobs_beside(job))] * ranks, job=job), ranks=ranks)


def steps_in(folders: Sequence[Path], job: str = ARCHIVE) -> dict[tuple[int, int], int]:
    """Return the step after which each part can be resumed, by rank and device; 0 beside other folders' records."""
    parts = find_parts(folders, [job])
    return {(part.rank, part.device): max(part.points).step if part.points else 0 for part in parts}


def whole(step: int, *, ranks: int = 1, folders: int = 1) -> dict[tuple[int, int], int]:
    return {(rank, device): 0 if device else step for rank in range(ranks) for device in range(folders)}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


def test_again_and_again(tmp_path: Path) -> None:
    """A script that fails again and again leaves its last two trainings, and the plan says what was replaced."""
    plans = []
    for step in (100, 2, 3):
        plans.append(archive([tmp_path]))
        leave([tmp_path], step=step)
    assert steps_in([tmp_path], JOB) == whole(3) and steps_in([tmp_path]) == whole(2)
    assert [(plan.step, plan.replaced) for plan in plans] == [(0, None), (100, None), (2, 100)]


def test_a_training_without_a_step(tmp_path: Path) -> None:
    """A training that was interrupted before its first step is not moved, and one that was archived before stays."""
    leave([tmp_path], step=7)
    archive([tmp_path])
    leave([tmp_path], step=0, has_steps=False)
    assert not archive([tmp_path]).moved
    create([tmp_path]).close(remove=True)
    assert steps_in([tmp_path], JOB) == {} and steps_in([tmp_path]) == whole(7)


@pytest.mark.parametrize(("before", "now"), [(3, 1), (1, 3), (2, 2)])
def test_other_numbers_of_ranks(before: int, now: int, folders: list[Path]) -> None:
    """All ranks' parts move together, and replace those of a training of again another number of ranks."""
    leave(folders, step=7, ranks=4)
    archive(folders, ranks=now)
    leave(folders, step=8, ranks=before)
    assert archive(folders, ranks=now).replaced == 7
    assert steps_in(folders, JOB) == {} and steps_in(folders) == whole(8, ranks=before, folders=2)
    assert [list(folder.iterdir()) for folder in folders] == [[folder / ARCHIVE] for folder in folders]


@pytest.mark.parametrize("used", [0, 1])
def test_fewer_folders_than_before(used: int, folders: list[Path]) -> None:
    """What lies in folders that the new training does not use moves, too."""
    leave(folders, step=7, ranks=2)
    archive(folders[used : used + 1])
    assert steps_in(folders, JOB) == {} and steps_in(folders) == whole(7, ranks=2, folders=2)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_folder_that_cannot_be_reached(lost: int, folders: list[Path]) -> None:
    """A training is not torn apart: the error names the part that is missing, and nothing moves."""
    leave(folders, step=7)
    folders[lost].rename(folders[lost].with_name("unmounted"))
    with pytest.raises(StorageError, match=rf"its part '{folders[lost]}/default/rank-00000' cannot be found") as caught:
        archive([folders[1 - lost]])
    assert f"Mount '{folders[lost]}'" in caught.value.remedy
    assert f"smart-infinity jobs {folders[1 - lost]} --remove default" in caught.value.remedy
    folders[lost].with_name("unmounted").rename(folders[lost])
    assert steps_in(folders, JOB) == whole(7, folders=2) and steps_in(folders) == {}


def test_what_can_never_be_resumed_again_stops_nobody(folders: list[Path]) -> None:
    """What a kill has left while a training was removed is no training: its manifests go first."""
    leave(folders, step=7)
    (folders[0] / "default/rank-00000/manifest.json").unlink()
    assert not archive(folders).moved
    create(folders).close(remove=True)
    assert steps_in(folders, JOB) == {}


def test_another_training_lies_where_a_part_was(tmp_path: Path) -> None:
    """Of a training whose place another one has taken, nothing can be resumed, and it stops nobody."""
    leave([tmp_path], step=7, ranks=2)
    leave([tmp_path], step=0, has_steps=False)  # replaces the part of rank 0
    store = create([tmp_path], rank=0, world_size=1)
    store.close(remove=False)
    assert not archive([tmp_path], ranks=2).moved


def test_a_store_that_is_to_be_kept(tmp_path: Path) -> None:
    """Neither one in the way nor one that lies where the training would be moved is touched, and nothing is moved."""
    for job in (JOB, ARCHIVE):
        leave([tmp_path], step=7)
        store = create([tmp_path], world_size=1, job=job, keep=True) if job == ARCHIVE else recover_store([tmp_path])
        if job == ARCHIVE:
            commit_generation(store, 0)
        store.keep()
        store.close(remove=False)
        before = find_parts([tmp_path], [JOB, ARCHIVE])
        with pytest.raises(StorageError, match=rf"{job}/rank-00000' holds .* asked to keep it"):
            archive([tmp_path])
        assert find_parts([tmp_path], [JOB, ARCHIVE]) == before
        (tmp_path / job).rename(tmp_path / f"{job} was kept")


@pytest.mark.parametrize(("ranks", "gone_on"), [(1, 1), (2, 2), (2, 1)], ids=["one", "two", "one of two"])
def test_what_a_training_has_gone_on_with_is_not_replaced(ranks: int, gone_on: int, tmp_path: Path) -> None:
    """A training that was resumed where it was archived is the user's newest work; the error names the ways out.

    So is one whose ranks were killed while they took it over.
    """
    leave([tmp_path], step=100, ranks=ranks)
    archive([tmp_path], ranks=ranks)
    go_on([tmp_path], step=150, ranks=gone_on)
    leave([tmp_path], step=2, ranks=ranks)
    before = steps_in([tmp_path])
    step = 150 if gone_on == ranks else 100
    with pytest.raises(StorageError, match=rf"resumed there and interrupted again after step {step}\.") as caught:
        archive([tmp_path], ranks=ranks)
    assert "transfer={'job': 'default.aside'}" in caught.value.remedy
    assert f"smart-infinity jobs {tmp_path} --remove default.aside" in caught.value.remedy
    assert steps_in([tmp_path], JOB) == whole(2, ranks=ranks) and steps_in([tmp_path]) == before


HOLDER = """
import sys
from pathlib import Path
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
held = RankFolder(Path(sys.argv[1]), create=False)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("job", [JOB, ARCHIVE])
def test_somebody_else_holds_one_part(job: str, folders: list[Path]) -> None:
    """Nothing moves, and nothing is deleted of what was archived before."""
    leave(folders, step=7, ranks=2)
    archive(folders)
    leave(folders, step=8, ranks=2)
    before = find_parts(folders, [JOB, ARCHIVE])
    command = [sys.executable, "-c", HOLDER, str(folders[1] / job / "rank-00001")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(StorageLockedError, match=f"in use by process {holder.pid}"):
            archive(folders, ranks=2)
        assert find_parts(folders, [JOB, ARCHIVE]) == before
        holder.communicate()
    archive(folders, ranks=2)
    assert steps_in(folders) == whole(8, ranks=2, folders=2)


def killed_before(number: int, folders: Sequence[Path]) -> bool:
    """Archive in a process that ends before a later rename or deletion of a file; return whether there was one."""
    child = os.fork()
    if child == 0:
        left = iter(range(number))

        def counted(call: Any) -> Any:
            return lambda *args, **kwargs: call(*args, **kwargs) if next(left, None) is not None else os._exit(9)

        os.rename, os.unlink = counted(os.rename), counted(os.unlink)
        try:
            archive(folders, ranks=2)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    return status != 0


@pytest.mark.parametrize(
    ("before", "then"),
    long_but(
        [(False, "again"), (False, ARCHIVE)],
        [(before, then) for before in (False, True) for then in ("again", JOB, ARCHIVE)],
    ),
)
def test_a_kill_at_any_moment(before: bool, then: str, folders: list[Path]) -> None:
    """A second start completes the move, and the training resumes by either name, or the error says by which."""
    moment, was_killed = 0, True
    while was_killed:
        here = [folder / str(moment) for folder in folders]
        if before:
            leave(here, step=5, ranks=2)
            archive(here, ranks=2)
        leave(here, step=7, ranks=2)
        was_killed = killed_before(moment, here)
        assert steps_in(here) | steps_in(here, JOB) == whole(7, ranks=2, folders=2)
        job = ARCHIVE if then == "again" else then
        if then == "again":
            archive(here, ranks=2)
        else:
            try:
                put_together(here, job=job, ranks=2)
            except StorageError as error:
                job = JOB if job == ARCHIVE else ARCHIVE
                assert f"pass transfer={{'job': {job!r}}}" in error.remedy
                put_together(here, job=job, ranks=2)
        if steps_in(here, job) != whole(7, ranks=2, folders=2):  # it came before what was there began to be deleted
            assert job == ARCHIVE and steps_in(here) == whole(5, ranks=2, folders=2)
        moment += 1
    assert moment > 4


def test_something_of_others_lies_where_it_would_be_moved(tmp_path: Path) -> None:
    """It is not touched, and nothing is moved."""
    leave([tmp_path], step=7)
    other = tmp_path / ARCHIVE / "rank-00000/mine.txt"
    other.parent.mkdir(parents=True, mode=0o700)
    other.parent.parent.chmod(0o700)
    other.write_text("mine")
    with pytest.raises(StorageError, match=r"aside/rank-00000' is in the way"):
        archive([tmp_path])
    assert steps_in([tmp_path], JOB) == whole(7) and other.read_text() == "mine"


def test_a_full_disk_names_the_interrupted_training(tmp_path: Path) -> None:
    """A new store cannot have the bytes of an interrupted training, and the error says how to free them."""

    def planned() -> Plan:
        return plan_archiving([find_parts([tmp_path], [JOB, ARCHIVE])], job=JOB, folders=[[tmp_path]])

    leave([tmp_path], step=7)
    plan = planned()
    moved = [part.path for _, part in plan.moved]
    (request,) = measure_space([tmp_path], job=JOB, rank=0, moved=moved, extents=extents(), num_parameters=2)
    (archived,) = measure_parts(plan.moved_by(0), deleted=False)
    assert request.reclaimable_bytes == archived.reclaimable_bytes == 0
    assert min(archived.resumable_bytes, leftover_bytes(moved[0])) >= extents().file_bytes(0)
    with pytest.raises(StorageFullError) as caught:
        require_space([replace(one, free_bytes=0) for one in (request, archived)])
    assert "resume one with ckpt_path='storage', or remove it" in caught.value.remedy
    archive([tmp_path])
    leave([tmp_path], step=8)
    (replaced,) = measure_parts(planned().deleted_by(0), deleted=True)
    assert replaced.reclaimable_bytes >= extents().file_bytes(0)


# ---- what ranks have left that there are no more, or that ran on another machine


def of_machines(disks: Sequence[Path], *, ranks: int = 2) -> Plan:
    """Make way for a training whose rank r runs on the machine with the disk of this number; carry it out."""
    seen = [find_parts([disk], [JOB, ARCHIVE]) for disk in disks]
    plan = plan_archiving(seen, job=JOB, folders=[[disk] for disk in disks])
    carry_out(plan, ranks=ranks)
    for rank, disk in enumerate(disks):  # what the rank's store does as it is made
        create([disk], rank=rank, world_size=ranks).close(remove=True)
    return plan


def on_disks(disks: Sequence[Path], *, step: int, has_steps: bool) -> None:
    """Leave a training whose rank r lies on the disk of this number."""
    store_id = os.urandom(16)
    for rank, disk in enumerate(disks):
        store = create([disk], rank=rank, world_size=len(disks), num_machines=len(disks), job_id=store_id)
        commit_generation(store, 0)
        store.record_training(generation=0, step=step, content=b"", has_steps=has_steps)
        store.close(remove=False)


def ranks_on(disk: Path, job: str = JOB) -> list[str]:
    return sorted(path.name for path in (disk / job).iterdir()) if (disk / job).exists() else []


def test_ten_interruptions_with_machines_in_changing_order(tmp_path: Path, attack: Attack) -> None:
    """Nothing is left but one training that was archived, with the parts of all of its ranks."""
    disks = [tmp_path / "node0", tmp_path / "node1"]
    for number in range(10):
        on_disks(disks if number % 3 else disks[::-1], step=number, has_steps=number % 4 != 2)
        of_machines(disks if number % 2 else disks[::-1])
        assert [ranks_on(disk) for disk in disks] == [[], []]
        assert sorted(ranks_on(disks[0], ARCHIVE) + ranks_on(disks[1], ARCHIVE)) == ["rank-00000", "rank-00001"]
    parts = [part for disk in disks for part in find_parts([disk], [ARCHIVE])]
    assert [max(part.points).step for part in parts] == [9, 9] and len({part.store for part in parts}) == 1
    attack(
        "interrupted training, then its machines in another order",
        tries=10,
        outcome="one is archived, nothing else is left",
    )


@pytest.mark.parametrize("why", ["kept", "in use"])
def test_what_stays_beside_a_new_training(why: str, tmp_path: Path) -> None:
    """A part of a further rank that somebody keeps or uses is not deleted; an error about space counts it."""
    store = create([tmp_path], rank=1, world_size=2, keep=why == "kept")
    if why == "kept":
        store.close(remove=False)
    plan = plan_archiving([find_parts([tmp_path], [JOB, ARCHIVE])], job=JOB, folders=[[tmp_path]])
    assert not plan.changes_something and [part.rank for part in plan.left_to(0)] == [1]
    (left,) = measure_parts(plan.left_to(0), deleted=False)
    assert left.resumable_bytes >= extents().file_bytes(0)
    carry_out(plan)
    assert ranks_on(tmp_path) == ["rank-00001"]
    if why == "in use":
        store.close(remove=True)


def test_machines_of_two_trainings(tmp_path: Path) -> None:
    """Where each machine has a disk of one path, a part of another training does not stand for one that is missing."""
    disks = {name: tmp_path / name for name in "ABCD"}
    on_disks([disks["A"], disks["B"]], step=500, has_steps=True)
    on_disks([disks["C"], disks["D"]], step=300, has_steps=True)

    def seen_on(name: str) -> list[Part]:
        return [
            replace(
                part, machine=name, path=Path("/mnt/nvme", part.path.relative_to(disks[name])), folders=("/mnt/nvme",)
            )
            for part in find_parts([disks[name]], [JOB, ARCHIVE])
        ]

    for names in ("AD", "DA", "AC", "A"):
        with pytest.raises(StorageError, match="cannot be found"):
            plan_archiving(list(map(seen_on, names)), job=JOB, folders=[[Path("/mnt/nvme")]] * len(names))
    plan = plan_archiving([seen_on("D")], job=JOB, folders=[[Path("/mnt/nvme")]])
    assert not plan.changes_something and len(plan.left) == 1  # it is in nobody's way
    plan = plan_archiving([seen_on("B"), seen_on("A")], job=JOB, folders=[[Path("/mnt/nvme")]] * 2)
    assert len(plan.moved) == 2 and not plan.deleted


# ---- damage to what says whose state it is, and how far it has come


def flipped(file: Path, number: int) -> bytes:
    """Flip a bit in this byte of a file, and return what was there before."""
    content = file.read_bytes()
    file.write_bytes(content[:number] + bytes([content[number] ^ 1 << number % 8]) + content[number + 1 :])
    return content


def files_of(folders: Sequence[Path], job: str) -> dict[str, bytes]:
    """Return the content of a job's files but the locks, by storage folder, rank and name."""
    found = [(folder, path) for folder in folders for path in (folder / job).rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder / job)) + folder.name: path.read_bytes()
        for folder, path in found
        if path.name != "lock"
    }


@pytest.mark.parametrize(
    ("rank", "device", "name", "step"),
    [
        (0, 0, "manifest.json", 7),
        (1, 1, "manifest.json", 7),
        (0, 0, "training-1.bin", 1),
        (1, 0, "commit.bin", 67),
        (0, 0, "lock", 1),
    ],
)
def test_one_flipped_bit_deletes_no_training(rank: int, device: int, name: str, step: int, folders: list[Path]) -> None:
    """Whatever byte it is in, all parts of the training are moved, whether it can still be resumed or not."""
    leave(folders, step=7, ranks=2)
    file = folders[device] / JOB / f"rank-{rank:05d}" / name
    content, damaged = file.read_bytes(), []
    for number in range(0, len(content), step):
        flipped(file, number)
        plan = plan_archiving([find_parts(folders, [JOB, ARCHIVE])] * 2, job=JOB, folders=[folders] * 2)
        assert (len(plan.moved), plan.deleted) == (4, ()), f"byte {number}"
        damaged.append(plan.is_damaged)
        file.write_bytes(content)
    assert damaged and (all(damaged) or name in ("commit.bin", "lock")) and (any(damaged) or name == "lock")
    flipped(file, 8)
    before = files_of(folders, JOB)
    archive(folders, ranks=2)
    assert files_of(folders, ARCHIVE) == before and files_of(folders, JOB) == {}


def test_damage_to_the_only_part(tmp_path: Path) -> None:
    """The training is archived, and a repaired manifest lets it be resumed from there."""
    leave([tmp_path], step=7)
    manifest = Path(JOB, "rank-00000/manifest.json")
    content = flipped(tmp_path / manifest, 100)
    plan = archive([tmp_path])
    assert plan.is_damaged and steps_in([tmp_path], JOB) == {}
    (tmp_path / ARCHIVE / "rank-00000/manifest.json").write_bytes(content)
    assert steps_in([tmp_path]) == whole(7)
    put_together([tmp_path], job=ARCHIVE)
    go_on([tmp_path], step=8)


def test_a_damaged_training_beside_one_that_was_archived(tmp_path: Path) -> None:
    """Neither is deleted: the error names both, and the next training that can be resumed replaces a damaged one."""
    leave([tmp_path], step=7)
    archive([tmp_path])
    leave([tmp_path], step=8)
    file = tmp_path / JOB / "rank-00000/manifest.json"
    content = flipped(file, 100)
    with pytest.raises(StorageError, match=r"damaged\. It is not deleted, .* in the job 'default\.aside'") as caught:
        archive([tmp_path])
    assert "--remove default or smart-infinity jobs" in caught.value.remedy
    file.write_bytes(content)
    assert steps_in([tmp_path], JOB) == whole(8) and steps_in([tmp_path]) == whole(7)
    flipped(tmp_path / ARCHIVE / "rank-00000/manifest.json", 100)
    assert archive([tmp_path]).step == 8 and steps_in([tmp_path]) == whole(8)


def test_a_damaged_part_and_one_that_cannot_be_reached(folders: list[Path]) -> None:
    """The rest of the training may come back, so that nothing is moved or deleted."""
    leave(folders, step=7, ranks=2)
    flipped(folders[0] / JOB / "rank-00000/manifest.json", 100)
    folders[1].rename(folders[1].with_name("unmounted"))
    with pytest.raises(StorageError, match="cannot be found"):
        archive(folders[:1], ranks=2)
    assert len(files_of(folders[:1], JOB)) > 2
