"""A new training moves interrupted ones out of its way as a whole, and archives at most one of each job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from lightning_smartinfinity.cli.scrub import Found, scrub_jobs
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageFullError, StorageLockedError
from lightning_smartinfinity.resume.record_content import _ENGINE_KEYS, TRAINER_KEYS, content_of
from lightning_smartinfinity.storage import StateStore, find_resumable, recover_store
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
from lightning_smartinfinity.storage.jobs.archiving import (
    Plan,
    plan_archiving,
    plan_making_way,
    plan_putting_together,
)
from lightning_smartinfinity.storage.jobs.mover import Mover
from lightning_smartinfinity.storage.jobs.trainings import Condition, jobs_beside, movers_of, trainings_in
from lightning_smartinfinity.storage.state.commit_record import CommitRecord
from lightning_smartinfinity.storage.state.parts import Part, find_parts
from lightning_smartinfinity.storage.state.space import (
    leftover_bytes,
    measure_parts,
    measure_space,
    require_space,
)
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.storage.makers import (
    commit_generation,
    create,
    extents,
    flip,
    held_by_another_process,
    killed_before,
    left,
    listed,
    persist_generations,
    recovered,
)

JOB, ARCHIVE = "default", "default.aside"
Stage = Callable[[Mover], None]


def leave_on(
    disks: Sequence[Sequence[Path]], *, step: int, job: str = JOB, has_steps: bool = True, machines: int = 0
) -> None:
    """Leave the stores of a training that was interrupted after a step, each rank's in folders of its own."""
    store_id, machines = os.urandom(16), machines or len(set(map(tuple, disks)))
    for rank, folders in enumerate(disks):
        store = create(folders, rank=rank, world_size=len(disks), num_machines=machines, job=job, job_id=store_id)
        commit_generation(store, 0)
        store.record_training(generation=0, step=step, content=b"", has_steps=has_steps)
        store.close(remove=False)


def leave(folders: Sequence[Path], *, step: int, ranks: int = 1, has_steps: bool = True) -> None:
    """Leave the stores of ranks that share their folders."""
    leave_on([folders] * ranks, step=step, has_steps=has_steps)


def go_on(folders: Sequence[Path], *, step: int, ranks: int = 1, job: str = ARCHIVE) -> None:
    """Resume a training and interrupt it after a further step."""
    for rank in range(ranks):
        store = recover_store(folders, job=job, rank=rank, training=1, run=bytes(16))
        store.record_training(generation=0, step=step, content=b"", has_steps=True)
        store.close(remove=False)


STAGES = (Mover.claim, Mover.disown, Mover.make_room, Mover.move)


def carry_out(plan: Plan, *, ranks: int = 1, stages: Sequence[Stage] = STAGES, moved_by: int | None = None) -> None:
    """Do what all ranks do together: every stage, or some, and then what one of them does of the move."""
    with ExitStack() as opened:
        movers = [opened.enter_context(closing(Mover(plan, rank=rank))) for rank in range(ranks)]
        for stage, mover in product(stages, movers):
            stage(mover)
        if moved_by is not None:
            movers[moved_by].move()


def plan_for(folders: Sequence[Path], *, ranks: int = 1) -> Plan:
    """Return the plan by which a training of so many ranks in these folders has its way."""
    return plan_archiving([find_parts(folders, [JOB, ARCHIVE])] * ranks, job=JOB, folders=[folders] * ranks)


def archive(folders: Sequence[Path], *, ranks: int = 1) -> Plan:
    """Make way for a training of so many ranks in these folders."""
    plan = plan_for(folders, ranks=ranks)
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


def refusal(folders: Sequence[Path], match: str, *, ranks: int = 1) -> str:
    """Return the remedy of the error by which nothing is moved or deleted."""
    before = find_parts(folders, [JOB, ARCHIVE])
    with pytest.raises(StorageError, match=match) as caught:
        archive(folders, ranks=ranks)
    assert find_parts(folders, [JOB, ARCHIVE]) == before
    return caught.value.remedy


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def twice(tmp_path: Path) -> list[Path]:
    """Return one storage folder, with a training after step 8 and one that was archived after step 7."""
    leave([tmp_path], step=7)
    archive([tmp_path])
    leave([tmp_path], step=8)
    return [tmp_path]


def test_a_training_without_a_step(tmp_path: Path) -> None:
    """A training that was interrupted before its first step is not moved, and one that was archived before stays."""
    leave([tmp_path], step=7)
    archive([tmp_path])
    leave([tmp_path], step=0, has_steps=False)
    assert not archive([tmp_path]).moved
    create([tmp_path]).close(remove=True)
    assert steps_in([tmp_path], JOB) == {} and steps_in([tmp_path]) == whole(7)


@pytest.mark.parametrize(
    ("before", "now", "used"), [(3, 1, [0, 1]), (1, 3, [0, 1]), (2, 2, [0, 1]), (2, 1, [0]), (2, 1, [1])]
)
def test_other_numbers_of_ranks_and_folders(before: int, now: int, used: list[int], folders: list[Path]) -> None:
    """All ranks' parts move together, and replace those of a training of again another number of ranks.

    What lies in folders that the new training does not use moves, too.
    """
    plans = [archive(folders)]
    leave(folders, step=7, ranks=4)
    plans.append(archive(folders, ranks=now))
    leave(folders, step=3, ranks=before)
    plans.append(archive([folders[number] for number in used], ranks=now))
    assert [(plan.step, plan.replaced) for plan in plans] == [(0, None), (7, None), (3, 7)]
    assert steps_in(folders, JOB) == {} and steps_in(folders) == whole(3, ranks=before, folders=2)
    assert [list(folder.iterdir()) for folder in folders] == [[folder / ARCHIVE] for folder in folders]


@pytest.mark.parametrize("other", [None, "elsewhere", "there"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_folder_that_cannot_be_reached(lost: int, other: str | None, folders: list[Path]) -> None:
    """What is here is archived, and a new training goes on. When the folder is back, the archived one resumes.

    One of fewer steps does not replace it. So it is if another drive is mounted there, with a training that was made
    elsewhere, or since on that drive alone.
    """
    leave(folders, step=7)
    before = files_of(folders, JOB)
    away, place = folders[lost].with_name("unmounted"), folders[lost]
    place.rename(away)
    if other is not None:
        made = place if other == "there" else place.with_name("other")
        leave([made], step=3)
        made.rename(place)
    now = folders if other else [folders[1 - lost]]
    strangers = files_of([place], JOB)
    plan = archive(now)
    assert plan.lost_storage == (repr(str(place)),) and not (plan.is_damaged or plan.deleted)
    assert plan.moved[0][1].storage == folders[1 - lost] and files_of([place], ARCHIVE) == strangers
    leave(now, step=6)
    remedy = refusal(now, rf"after (step 7|an unknown step), which lacks its part in '{place}'\. It is not deleted")
    assert f"mount '{place}', and resume it with" in remedy and "--remove default or smart-infinity jobs" in remedy
    assert "Or resume the one in the job 'default', with ckpt_path='storage'. Or remove" in remedy
    if other is not None:
        place.rename(place.with_name("other"))
    away.rename(place)
    put_together(folders, job=ARCHIVE)
    assert steps_in(folders) == whole(7, folders=2) and files_of(folders, ARCHIVE) == before


@pytest.mark.parametrize("lost", [0, 1])
def test_the_only_folder_of_a_rank_that_cannot_be_reached(lost: int, folders: list[Path]) -> None:
    """If each rank has a folder of its own (``{local_rank}``), that of the missing rank is named, if it is known."""
    own = [[folder] for folder in folders]
    leave_on(own, step=7, machines=1)
    content = flip(manifest := folders[lost] / JOB / f"rank-0000{lost}/manifest.json", 100)
    plan = plan_archiving([find_parts(each, [JOB]) for each in own], job=JOB, folders=own)
    assert plan.is_damaged and len(plan.moved) == 2 and not plan.lost_storage
    manifest.write_bytes(content)
    folders[lost].rename(folders[lost].with_name("unmounted"))
    seen = [find_parts(each, [JOB]) for each in own]
    plan = plan_archiving(seen, job=JOB, folders=own)
    assert plan.lost_storage == (repr(str(folders[lost])),) and len(plan.moved) == 1
    other = plan_archiving(seen, job=JOB, folders=[own[1 - lost]] * 2)  # other settings: the path is unknown
    assert other.lost_storage == (f"the storage folder of rank {lost}",)


def test_a_part_that_replaces_nothing(folders: list[Path]) -> None:
    """A training without one of its folders is not archived in the place of one that can be resumed.

    One that can be resumed is archived in its place if it has more steps.
    """
    leave(folders, step=7)
    archive(folders)
    leave(folders, step=8)
    (folders[1] / JOB).rename(folders[1] / "lost")
    remedy = refusal(folders, rf"lacks its part in '{folders[1]}'\. It is not deleted, .* in the job 'default\.aside'")
    assert "--remove default or smart-infinity jobs" in remedy
    (folders[1] / "lost").rename(folders[1] / JOB)
    (folders[1] / ARCHIVE).rename(folders[1] / "lost")
    plan = archive(folders)
    assert (plan.step, plan.replaced, plan.replaces_damaged) == (8, None, True)


def test_what_can_never_be_resumed_again_stops_nobody(folders: list[Path], tmp_path: Path) -> None:
    """What a kill has left while a training was removed is no training: its records and manifests go first.

    Nor is one whose place another training has taken.
    """
    leave(folders, step=7)
    half_gone = RankFolder(folders[0] / JOB / "rank-00000", create=False)
    half_gone.disown()
    half_gone.close(remove=False)
    assert not archive(folders).moved
    create(folders).close(remove=True)
    assert steps_in(folders, JOB) == {}
    leave([tmp_path], step=7, ranks=2)
    leave([tmp_path], step=0, has_steps=False)  # replaces the part of rank 0
    create([tmp_path], rank=0, world_size=1).close(remove=False)
    assert not archive([tmp_path], ranks=2).moved


@pytest.mark.parametrize("kept", [JOB, ARCHIVE])
def test_a_store_that_is_to_be_kept(kept: str, twice: list[Path]) -> None:
    """Neither one in the way nor one that lies where the training would be moved is touched, and nothing is moved."""
    store = recover_store(twice, job=kept)
    store.keep()
    store.close(remove=False)
    refusal(twice, rf"{kept}/rank-00000' holds .* asked to keep it")


@pytest.mark.parametrize(("ranks", "gone_on"), [(1, 1), (2, 2), (2, 1)], ids=["one", "two", "one of two"])
def test_what_a_training_has_gone_on_with_is_not_replaced(ranks: int, gone_on: int, tmp_path: Path) -> None:
    """A training that was resumed where it was archived is the user's newest work; the error names the ways out.

    So is one whose ranks were killed while they took it over.
    """
    leave([tmp_path], step=100, ranks=ranks)
    archive([tmp_path], ranks=ranks)
    go_on([tmp_path], step=150, ranks=gone_on)
    leave([tmp_path], step=2, ranks=ranks)
    step = 150 if gone_on == ranks else 100
    remedy = refusal([tmp_path], rf"resumed there and interrupted again after step {step}\.", ranks=ranks)
    ways_out = ("transfer={'job': 'default.aside'}", f"smart-infinity jobs {tmp_path} --remove default.aside")
    assert [way for way in ways_out if way not in remedy] == []
    assert steps_in([tmp_path], JOB) == whole(2, ranks=ranks)


@pytest.mark.parametrize("job", [JOB, ARCHIVE])
def test_somebody_else_holds_one_part(job: str, folders: list[Path]) -> None:
    """Nothing moves, and nothing is deleted of what was archived before."""
    leave(folders, step=7, ranks=2)
    archive(folders)
    leave(folders, step=8, ranks=2)
    with held_by_another_process(folders[1] / job / "rank-00001") as holder:
        with pytest.raises(StorageLockedError, match=f"in use by process {holder}"):
            archive(folders, ranks=2)
        assert steps_in(folders, JOB) == whole(8, ranks=2, folders=2)
        assert steps_in(folders) == whole(7, ranks=2, folders=2)
    archive(folders, ranks=2)
    assert steps_in(folders) == whole(8, ranks=2, folders=2)


@pytest.mark.parametrize(
    ("before", "then", "ranks"),
    long_but(
        [(True, "again", 1), (False, ARCHIVE, 2)],
        [(before, then, 2) for before in (False, True) for then in ("again", JOB, ARCHIVE)] + [(True, "again", 1)],
    ),
)
def test_a_kill_at_any_moment(before: bool, then: str, ranks: int, folders: list[Path]) -> None:
    """A second start completes the move, and the training resumes by either name, or the error says by which."""
    moment, was_killed = 0, True
    while was_killed:
        here = [folder / str(moment) for folder in folders]
        if before:
            leave(here, step=9, ranks=ranks)
            archive(here, ranks=ranks)
        leave(here, step=7, ranks=ranks)
        was_killed = killed_before(moment, partial(archive, here, ranks=ranks))
        assert steps_in(here) | steps_in(here, JOB) == whole(7, ranks=ranks, folders=2)
        job = ARCHIVE if then == "again" else then
        if then == "again":
            archive(here, ranks=ranks)
        else:
            try:
                put_together(here, job=job, ranks=ranks)
            except StorageError as error:
                job = JOB if job == ARCHIVE else ARCHIVE
                assert f"pass transfer={{'job': {job!r}}}" in error.remedy
                put_together(here, job=job, ranks=ranks)
        if steps_in(here, job) != whole(7, ranks=ranks, folders=2):  # it came before what was there began to be deleted
            assert job == ARCHIVE and steps_in(here) == whole(9, ranks=ranks, folders=2)
        moment += 1
    assert moment > 4


def test_something_of_others_lies_where_it_would_be_moved(tmp_path: Path) -> None:
    """It is not touched, and nothing is moved."""
    leave([tmp_path], step=7)
    other = tmp_path / ARCHIVE / "rank-00000/mine.txt"
    for folder in (other.parents[1], other.parent):
        folder.mkdir(mode=0o700)
    other.write_text("mine")
    refusal([tmp_path], r"aside/rank-00000' is in the way")
    assert other.read_text() == "mine"


def test_a_full_disk_names_the_interrupted_training(tmp_path: Path) -> None:
    """A new store cannot have the bytes of an interrupted training, and the error says how to free them."""
    leave([tmp_path], step=7)
    plan = plan_for([tmp_path])
    moved = [part.path for _, part in plan.moved]
    (request,) = measure_space([tmp_path], job=JOB, rank=0, moved=moved, extents=extents(), num_parameters=2)
    (archived,) = measure_parts(plan.moved_by(0), deleted=False)
    assert request.reclaimable_bytes == archived.reclaimable_bytes == 0
    assert min(archived.resumable_bytes, leftover_bytes(moved[0])) >= extents().file_bytes(0)
    with pytest.raises(StorageFullError, match=r"resume one with ckpt_path='storage', or remove it"):
        require_space([replace(one, free_bytes=0) for one in (request, archived)])
    archive([tmp_path])
    leave([tmp_path], step=8)
    (replaced,) = measure_parts(plan_for([tmp_path]).deleted_by(0), deleted=True)
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


def ranks_on(disk: Path, job: str = JOB) -> list[str]:
    return sorted(path.name for path in (disk / job).iterdir()) if (disk / job).exists() else []


def test_ten_interruptions_with_machines_in_changing_order(tmp_path: Path, attack: Attack) -> None:
    """Nothing is left but one training that was archived, with the parts of all of its ranks."""
    disks = [tmp_path / "node0", tmp_path / "node1"]
    for number in range(10):
        leave_on([[disk] for disk in (disks if number % 3 else disks[::-1])], step=number, has_steps=number % 4 != 2)
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


def test_what_stays_beside_a_new_training(tmp_path: Path) -> None:
    """A part of a further rank that somebody keeps or uses is not deleted; an error about space counts it."""
    create([tmp_path], rank=1, world_size=3, keep=True).close(remove=False)
    in_use = create([tmp_path], rank=2, world_size=3)
    plan = plan_for([tmp_path])
    assert not plan.changes_something and [part.rank for part in plan.left_to(0)] == [1, 2]
    for part in measure_parts(plan.left_to(0), deleted=False):
        assert part.resumable_bytes >= extents().file_bytes(0)
    carry_out(plan)
    assert ranks_on(tmp_path) == ["rank-00001", "rank-00002"]
    in_use.close(remove=True)


def test_machines_of_two_trainings(tmp_path: Path) -> None:
    """Where each machine has a disk of one path, a part of another training does not stand for one that is missing."""
    disks = {name: tmp_path / name for name in "ABCD"}
    leave_on([[disks["A"]], [disks["B"]]], step=500)
    leave_on([[disks["C"]], [disks["D"]]], step=300)

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
        (0, 0, "state.bin", 9001),
        (0, 0, "lock", 1),
    ],
)
def test_one_flipped_bit_deletes_no_training(
    rank: int, device: int, name: str, step: int, folders: list[Path], attack: Attack
) -> None:
    """Whatever byte it is in, all parts of the training are moved, whether it can still be resumed or not."""
    leave(folders, step=7, ranks=2)
    file = folders[device] / JOB / f"rank-{rank:05d}" / name
    content, damaged = file.read_bytes(), []
    for number in range(0, len(content), step):
        flip(file, number, number % 8)
        plan = plan_for(folders, ranks=2)
        assert (len(plan.moved), plan.deleted) == (4, ()), f"byte {number}"
        damaged.append(plan.is_damaged)
        file.write_bytes(content)
    attack(
        f"bit flip in {name} of an interrupted training, before a new one",
        tries=len(damaged),
        outcome="archived as a whole, nothing is deleted",
    )
    unseen = name in ("state.bin", "lock")
    assert damaged and (all(damaged) or unseen or name == "commit.bin") and any(damaged) != unseen
    flip(file, 8)
    before = files_of(folders, JOB)
    archive(folders, ranks=2)
    assert files_of(folders, ARCHIVE) == before and files_of(folders, JOB) == {}


def test_a_damaged_training_beside_one_that_was_archived(twice: list[Path]) -> None:
    """Neither is deleted: the error names both, also if the steps of the archived one are unknown."""
    file = twice[0] / JOB / "rank-00000/manifest.json"
    content = flip(file, 100)
    remedy = refusal(twice, r"damaged\. It is not deleted, .* in the job 'default\.aside'")
    assert "--remove default or smart-infinity jobs" in remedy
    file.write_bytes(content)
    assert steps_in(twice, JOB) == whole(8) and steps_in(twice) == whole(7)
    flip(twice[0] / ARCHIVE / "rank-00000/manifest.json", 100)
    remedy = refusal(twice, r"an unknown step, whose manifest or records are damaged\. It is not .* after step 8 and")
    assert "If its files can be repaired, do so" in remedy and "--remove default or smart-infinity jobs" in remedy


def test_a_damaged_part_and_one_that_cannot_be_reached(folders: list[Path]) -> None:
    """All that is here is archived, and nothing is deleted."""
    leave(folders, step=7, ranks=2)
    flip(folders[0] / JOB / "rank-00000/manifest.json", 100)
    folders[1].rename(folders[1].with_name("unmounted"))
    before = files_of(folders, JOB)
    assert archive(folders[:1], ranks=2).lost_storage == (repr(str(folders[1])),)
    assert files_of(folders, ARCHIVE) == before


HARM: dict[str, Callable[[Path], object]] = {
    "emptied": lambda file: os.truncate(file, 0),
    "removed": Path.unlink,
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 3),
}
RECORDS = ("training-0.bin", "training-1.bin")


@pytest.mark.filterwarnings("ignore:.* record .*damaged", "ignore:.* record .*missing")
@pytest.mark.parametrize("recorded", [3, 4], ids=["after a step", "in a step"])
@pytest.mark.parametrize("how", HARM)
def test_a_lost_file_deletes_no_training(how: str, recorded: int, folders: list[Path], attack: Attack) -> None:
    """The training resumes from a step that it has, or an error names the file; a scrub agrees, and all is archived."""
    content = content_of(dict.fromkeys(_ENGINE_KEYS), dict.fromkeys(TRAINER_KEYS))
    names = ("manifest.json", "state.bin", "commit.bin", *RECORDS, "training-?.bin", "[!l]*", "[!lcs]*")
    for number, (device, name) in enumerate([*product((0,), names), *product((1,), names[:2])]):
        here = [folder.with_name(f"{folder.name}{number}") for folder in folders]
        left(*here, generations=3, steps=range(recorded), world_size=1, content=content)
        files = sorted((here[device] / JOB / "rank-00000").glob(name), key=lambda file: (file.name[0] != "m", file))
        for file in files:
            HARM[how](file)
        named = str(files[0].parent if (device, name, how) == (1, "manifest.json", "removed") else files[0])
        jobs, before, newest = listed(*here), files_of(here, JOB), None
        found = scrub_jobs(jobs, show=hidden)
        assert any(named in sentence for sentence in (*found.damaged, *found.unknown)), name
        try:
            newest = find_resumable(here, job=JOB, rank=0)[1][0]
        except StorageError as error:
            assert named in error.problem and (found.damaged or named != str(files[0])), name
            assert "the one before" not in error.problem  # the other record is that of a later step
        is_unread = name == "state.bin" and how != "removed"
        assert any(job.resumable_step is not None for job in jobs) == (newest is not None or is_unread), name
        archive(here)
        assert files_of(here, ARCHIVE) == before and files_of(here, JOB) == {}, name
        assert newest is not None or recorded == 4 or name not in RECORDS
        if newest is not None:
            assert newest.step == newest.generation == (1 if (recorded, name) == (3, RECORDS[1]) else 2), name
            recovered(*here, job=ARCHIVE, newest=newest.generation, training=newest.number, remove=False)
            assert scrub_jobs(listed(*here), show=hidden) == Found(), name
    attack(
        f"file of an interrupted training {how}, before jobs, scrub, a resume and a new one",
        tries=10,
        outcome="named; resumed to the bit, or archived as a whole",
    )


@pytest.mark.parametrize("lost", ["all of rank 1", "manifests of rank 0", "record of rank 1"])
def test_files_of_another_time_or_place_delete_no_training(lost: str, folders: list[Path]) -> None:
    """Where an old backup of one rank was put back, manifests are exchanged or a record is missing, all is archived."""
    steps = 2 if lost == "record of rank 1" else 5
    for rank in range(2):
        num = 3 if lost == "all of rank 1" and rank == 1 else steps
        store = create(folders, rank=rank, job_id=SUCCESSOR)
        for step in range(num):
            commit_generation(store, step)
            store.record_training(generation=step, step=step, content=b"", has_steps=step > 0)
        store.close(remove=False)
    first, second = (folder / JOB / "rank-00000/manifest.json" for folder in folders)
    if lost == "manifests of rank 0":
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    if lost == "record of rank 1":
        (folders[0] / JOB / "rank-00001/training-1.bin").unlink()
    before, found = files_of(folders, JOB), scrub_jobs(listed(*folders), show=hidden)
    assert found.damaged or "rank-00001/training-1.bin' is missing" in found.unknown[0]
    assert archive(folders, ranks=2).is_damaged
    assert files_of(folders, ARCHIVE) == before and files_of(folders, JOB) == {}


def zero_second_half(file: Path) -> None:
    """Zero the half of commit.bin that the first write at an interval has filled."""
    half = file.stat().st_size // 2
    file.write_bytes(file.read_bytes()[:half] + bytes(half))


@pytest.mark.filterwarnings("ignore:.* record .*damaged")
@pytest.mark.parametrize(
    ("name", "harm", "steps"), [("commit.bin", zero_second_half, []), ("training-0.bin", HARM["emptied"], [6])]
)
def test_the_first_writes_at_an_interval(
    name: str, harm: Callable[[Path], object], steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold many steps: what is lost of them is named, and all is archived. A failure, or a kill, is no damage."""
    content = content_of(dict.fromkeys(_ENGINE_KEYS), dict.fromkeys(TRAINER_KEYS))
    store, write_record, left = create([tmp_path], world_size=1), StateStore._write_record, list[Path]()
    commit_generation(store, 0)
    store.write_back(store.extents.num_tasklets)

    def leave(store: StateStore, record: CommitRecord, *, flush: bool) -> int:
        left.append(tmp_path.with_name(f"{tmp_path.name}-{len(left)}"))
        shutil.copytree(tmp_path, left[-1])
        if len(left) == 1:
            raise StorageFullError("By a test.", "")
        return write_record(store, record, flush=flush)

    monkeypatch.setattr(StateStore, "_write_record", leave)
    with pytest.raises(StorageFullError):
        persist_generations(store, 3, content=content)
    for _ in range(1 + len(steps)):
        persist_generations(store, 3, content=content)
    store.close(remove=False)
    found = [trainings_in(find_parts([each], [JOB]), JOB)[0].condition for each in left]
    assert found == [Condition.NO_STEP, Condition.NO_STEP, Condition.RESUMABLE][: len(left)]
    assert scrub_jobs(listed(tmp_path), show=hidden) == Found()
    file = tmp_path / JOB / "rank-00000" / name
    harm(file)
    told, before = scrub_jobs(listed(tmp_path), show=hidden), files_of([tmp_path], JOB)
    assert str(file) in (told.damaged or told.unknown)[0]
    assert (archive([tmp_path]).is_damaged, files_of([tmp_path], ARCHIVE)) == (not steps, before)
    with pytest.raises(StorageCorruptError) if not steps else nullcontext():
        assert [each.step for each in find_resumable([tmp_path], job=ARCHIVE, rank=0)[1]] == steps


def test_what_was_never_or_is_no_more(tmp_path: Path) -> None:
    """A first step that was rolled back, and a training whose removal was killed, are not damaged."""
    store = create([tmp_path / "first"], world_size=1)
    commit_generation(store, 0)
    store.record_training(generation=1, step=1, content=b"", has_steps=True)
    store.forget_training()
    store.close(remove=False)
    assert trainings_in(find_parts([tmp_path / "first"], [JOB]), JOB)[0].condition is Condition.NO_STEP
    moment, was_killed = 0, True
    while was_killed:
        here = tmp_path / str(moment)
        left(here, generations=2, steps=range(3), world_size=1)
        was_killed = killed_before(moment, partial(recovered, here))
        found = trainings_in(find_parts([here], [JOB]), JOB)
        assert moment == 0 or [each.condition for each in found if each.condition is not Condition.NO_STEP] == []
        moment += 1
    assert moment > 3


# ---- a training that goes on in stores of other ranks has one whole set of stores at any time

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
        left(*folders, generations=int(rank < recorded), steps=[7], rank=rank, world_size=NEW, job_id=SUCCESSOR)


@pytest.fixture
def old(folders: list[Path]) -> list[Path]:
    """Return two storage folders with a training of the old ranks."""
    leave(folders, step=7, ranks=OLD)
    return folders


@pytest.mark.parametrize("ranks", [1, OLD, NEW])
@pytest.mark.parametrize(("created", "recorded"), [(0, 0), (1, 0), (NEW, 0), (NEW, NEW - 1)])
def test_a_kill_before_the_new_stores_are_whole(created: int, recorded: int, ranks: int, old: list[Path]) -> None:
    """What there is of them is deleted, and the old stores are moved back, whoever resumes."""
    carry_out(way(old), ranks=NEW)
    fill(old, created=created, recorded=recorded)
    put_together(old, job=JOB, ranks=ranks)
    assert steps_in(old, JOB) == whole(7, ranks=OLD, folders=2) and steps_in(old) == {}


@pytest.mark.parametrize("way_back", [False, True])
def test_a_kill_while_the_old_stores_move(way_back: bool, old: list[Path]) -> None:
    """They are moved back together, on the way there and on the way back."""
    plan = way(old)
    if way_back:
        carry_out(plan, ranks=NEW)
        fill(old, recorded=0)
        plan = plan_putting_together([find_parts(old, jobs_beside(JOB))] * NEW, job=JOB)
    carry_out(plan, ranks=NEW, stages=STAGES[: 1 + 2 * way_back], moved_by=0 if way_back else 1)
    assert len(steps_in(old)) == len(steps_in(old, JOB)) == 2
    put_together(old, job=JOB)
    assert steps_in(old, JOB) == whole(7, ranks=OLD, folders=2) and steps_in(old) == {}


def test_the_old_stores_go_when_the_new_ones_are_whole(old: list[Path]) -> None:
    """A kill while they are deleted leaves nothing that the next start does not delete."""
    carry_out(way(old), ranks=NEW)
    fill(old)
    half_gone = RankFolder(old[0] / ARCHIVE / "rank-00000", create=False)
    half_gone.disown()
    half_gone.close(remove=False)
    RankFolder(old[1] / ARCHIVE / "rank-00001", create=False).destroy()
    put_together(old, job=JOB, ranks=NEW)
    assert steps_in(old, JOB) == whole(7, ranks=NEW, folders=2)
    assert not any((folder / ARCHIVE).exists() for folder in old)


def test_another_training_in_the_way_is_not_deleted(old: list[Path]) -> None:
    """If a new training was begun in between, nothing moves, by whichever of the two names a training resumes."""
    carry_out(way(old), ranks=NEW)
    leave(old, step=0, has_steps=False)
    for job in (JOB, ARCHIVE):
        assert not plan_putting_together([find_parts(old, jobs_beside(job))], job=job).changes_something


def test_a_damaged_part_in_the_way_is_not_deleted(old: list[Path]) -> None:
    """Whose it is cannot be read, so the old stores are not moved back; the error says by which name they resume."""
    carry_out(way(old), ranks=NEW)
    fill(old, created=1, recorded=0)
    flip(old[0] / JOB / "rank-00000/manifest.json", 100)
    before = files_of(old, JOB)
    broken = rf"'{old[0] / JOB / 'rank-00000'}' cannot be resumed: its manifest or records are damaged"
    with pytest.raises(StorageError, match=rf"{broken}\. Another that .* is in the job 'default\.aside'"):
        put_together(old, job=JOB, ranks=OLD)
    assert files_of(old, JOB) == before and steps_in(old) == whole(7, ranks=OLD, folders=2)


@pytest.mark.parametrize("damage", ["records are damaged", "cannot be found"])
def test_old_stores_that_are_broken_when_the_new_ones_are_incomplete(damage: str, old: list[Path]) -> None:
    """Neither can be resumed: the error names the old ones, and nothing is deleted or moved."""
    carry_out(way(old), ranks=NEW)
    fill(old, recorded=0)
    if damage == "cannot be found":
        (old[1] / ARCHIVE).rename(old[1] / "unmounted")
    else:
        flip(old[0] / ARCHIVE / "rank-00001/manifest.json", 100)
    before = find_parts(old, [JOB, ARCHIVE])
    with pytest.raises(StorageError, match=f"'{old[0] / ARCHIVE}.*moved to another number of processes.*{damage}"):
        put_together(old, job=JOB, ranks=OLD)
    assert find_parts(old, [JOB, ARCHIVE]) == before


def test_a_training_that_is_archived_later_is_no_source(old: list[Path]) -> None:
    """The note of the successor goes when the training has gone on, so that nothing else is deleted for it."""
    carry_out(way(old), ranks=NEW)
    put_together(old, job=JOB)
    assert {part.successor for part in find_parts(old, [JOB])} == {SUCCESSOR}
    for rank in range(OLD):
        recover_store(old, rank=rank, training=1, run=os.urandom(16)).close(remove=False)
    assert {part.successor for part in find_parts(old, [JOB])} == {None}
    archive(old)
    assert {part.successor for part in find_parts(old, [ARCHIVE])} == {None}


def test_copies_count_once(tmp_path: Path) -> None:
    """A training in the folders that were named comes before the one that it was copied from."""
    leave([tmp_path / "a"], step=7)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert [part.storage for part in find_parts([tmp_path / "b"], [JOB])] == [tmp_path / "b"]
