"""A scrub reads every extent of the newest generation; jobs are listed and removed; residuals are told from damage."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageLockedError
from lightning_smartinfinity.storage import StateStore, find_resumable, recover_store
from lightning_smartinfinity.storage.folders.lock import read_lock
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.jobs.jobs import Job, find_job, find_jobs
from lightning_smartinfinity.storage.jobs.removal import remove_job
from lightning_smartinfinity.storage.records import residual_file
from lightning_smartinfinity.storage.records.residual_file import residual_bytes
from lightning_smartinfinity.storage.records.training_record import TrainingRecord, read_training_records
from lightning_smartinfinity.storage.state import scrub, space
from lightning_smartinfinity.storage.state.parts import look_at
from lightning_smartinfinity.storage.state.scrub import scrub_rank
from tests.helpers.attacks import Attack
from tests.helpers.native_testing import Hold
from tests.storage.makers import (
    NUMEL,
    commit_generation,
    create,
    flip,
    left,
    refuse_to_open,
    residual_memory as memory,
    tree,
)


def made(*folders: Path) -> tuple[StateStore, list[Path]]:
    """Return a closed store of two generations, and its folders."""
    left(*folders, generations=2)
    store = recover_store(folders)
    store.close(remove=False)
    return store, [folder / "default" / "rank-00000" for folder in folders]


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_a_whole_store(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All extents of both folders are read, in any order of the folders, with progress, and nothing changes.

    State that is partly in a folder which was not named is not called whole.
    """
    monkeypatch.setattr(scrub, "_BATCH", batch)
    store, folders = made(tmp_path / "a", tmp_path / "b")
    before, told = tree(tmp_path), []

    @contextmanager
    def show(what: str, total: int) -> Iterator[Any]:
        told.append(total)
        yield lambda nbytes: told.append(-nbytes)

    found = scrub_rank(folders[::-1], rank=0, show=show)
    num_bytes = sum(extent.nbytes for extent in store.extents.extents)
    assert found == replace(found, generation=1, num_extents=5, damaged=(), num_bytes=num_bytes)
    with pytest.raises(StorageError, match="2 storage folders; 1 named"):
        scrub_rank(folders[:1], rank=0, show=hidden)
    assert sum(told) == 0 and len(told) > 1 and tree(tmp_path) == before
    assert recover_store([tmp_path / "a", tmp_path / "b"]).generation == 1


def test_every_damaged_extent_is_named(tmp_path: Path, attack: Attack) -> None:
    """A flipped bit in any region or trailer is found, and two damaged extents are both named."""
    store, (folder,) = made(tmp_path)
    offsets = [store.extents.place_offset(int(position)) for position in store.placement.positions]
    path = folder / "state.bin"
    for tasklet, at in [(0, 0), (1, 4096), (2, 8192), (4, store.extents.extents[4].nbytes - 1)]:
        before = flip(path, offsets[tasklet] + at)
        (sentence,) = scrub_rank([folder], rank=0, show=hidden).damaged
        assert f"tasklet {tasklet} at offset {offsets[tasklet]} of {path}" in sentence
        path.write_bytes(before)
    (free, *_) = set(range(2 * store.extents.num_tasklets)) - set(store.placement.positions.tolist())
    # The last is where the newest generation has nothing.
    for offset in (offsets[1], offsets[3], store.extents.place_offset(free)):
        flip(path, offset)
    assert len(scrub_rank([folder], rank=0, show=hidden).damaged) == 2
    attack("bit flip in state on storage, before a scrub", tries=6, outcome="the scrub names the extent")


def test_the_lock_of_a_store_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to the lock, two may read at once, and a training that starts meanwhile is told why not.

    Versions before 0.1.0.dev6 kept the seal among the notes. They are read as theirs.
    """
    _, (folder,) = made(tmp_path)
    _, notes = read_lock(OpenFolder(folder))
    (folder / "lock").write_text("123\n" + "\n".join(sorted((folder / "lock").read_text().splitlines()[1:])) + "\n")
    before = (folder / "lock").read_bytes()
    assert read_lock(OpenFolder(folder)) == (123, notes)
    seen = []

    @contextmanager
    def show(what: str, total: int) -> Iterator[Any]:
        assert scrub_rank([folder], rank=0, show=hidden).damaged == () and not find_jobs(tmp_path)[0].in_use
        with pytest.raises(StorageLockedError, match="by a process that reads it"):
            create([tmp_path])
        seen.append(what)
        yield lambda nbytes: None

    assert scrub_rank([folder], rank=0, show=show).damaged == ()
    assert seen and (folder / "lock").read_bytes() == before


def test_a_drive_that_is_mounted_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened for writing."""
    _, (folder,) = made(tmp_path)
    refuse_to_open(monkeypatch, errno.EROFS, lambda flags: flags & os.O_ACCMODE != os.O_RDONLY)
    found = scrub_rank([folder], rank=0, show=hidden)
    assert (found.damaged, found.unknown) == ((), ()) and found.num_extents


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read is given up, and what was found before is told; it is not called damage."""
    _, (folder,) = made(tmp_path)
    flip(folder / "state.bin", 0)
    damaged = set(scrub_rank([folder], rank=0, show=hidden).damaged)
    for name, value in {"IO_TIMEOUT": 0.2, "_BATCH": 1}.items():
        monkeypatch.setattr(scrub, name, value)
    real, holds = scrub._failure, []

    def failure(pipeline: Any, *rest: Any) -> Any:
        if not holds:
            holds.append(Hold(pipeline, read_at=4, count=1 << 20))
        return real(pipeline, *rest)

    monkeypatch.setattr(scrub, "_failure", failure)
    try:
        found = scrub_rank([folder], rank=0, show=hidden)
    finally:
        holds[0].release()
    (sentence,) = found.unknown
    assert "state.bin" in sentence and "did not return within" in sentence and {*found.damaged} <= damaged


# ---- jobs in a storage folder: what is listed, and what is removed


def of_ranks(storage: Path, *generations: int, **config: object) -> None:
    """Leave the state of one rank of a job for each of these generations."""
    for rank, generation in enumerate(generations):
        left(storage, rank=rank, generations=generation + 1, **config)


def only(storage: Path) -> Job:
    (job,) = find_jobs(storage)
    return job


def test_a_dead_job(tmp_path: Path) -> None:
    """The newest generation is the one that all ranks have, and the size is what their files take."""
    of_ranks(tmp_path, 2, 1, job="mine")
    (tmp_path / "mine/notes").mkdir()
    (tmp_path / "others").mkdir()
    before = tree(tmp_path)
    job = only(tmp_path)
    assert (job.name, job.generation, job.in_use, job.pids, job.kept, job.problems) == ("mine", 1, False, [], False, [])
    assert [(folder.rank, folder.pid, folder.generation) for folder in job.folders] == [
        (0, os.getpid(), 2),
        (1, os.getpid(), 1),
    ]
    files = [path for path in (tmp_path / "mine").rglob("*") if path.is_file() and path.name != "lock"]
    assert job.num_bytes == sum(path.stat().st_blocks * 512 for path in files) > 0
    assert job.written is not None and abs(job.written - time.time()) < 3600 and tree(tmp_path) == before


def test_files_of_something_else_stay(tmp_path: Path) -> None:
    """A folder with other files is left, and is named. Of archived files only manifests and locks are ours."""
    of_ranks(tmp_path, 0)
    folder = tmp_path / "default/rank-00000"
    names = ["mine", "notes.aside", "manifest.json.x.aside", "manifest.json.1.aside.txt", "lockx1.aside"]
    for name in [*names, "manifest.json.2.aside", "lock.1.aside"]:
        (folder / name).touch()
    assert remove_job(only(tmp_path), kept=False) == [folder] and sorted(os.listdir(folder)) == sorted(names)


def test_a_kept_job_is_removed_on_request(tmp_path: Path) -> None:
    """State that is to be kept goes only if that is asked for, also if it was not yet to be kept when it was listed."""
    of_ranks(tmp_path, 0)
    listed = only(tmp_path)
    of_ranks(tmp_path, 0, keep=True)
    before = tree(tmp_path)
    with pytest.raises(StorageError, match="is to be kept"):
        remove_job(listed, kept=False)
    assert only(tmp_path).kept and tree(tmp_path) == before
    remove_job(listed, kept=True)
    assert tree(tmp_path) == set()


def test_a_job_that_cannot_be_read(tmp_path: Path) -> None:
    """A damaged manifest, a link in place of a folder or of a file is told, and does not hide other jobs."""
    for name in ("damaged", "linked", "whole"):
        of_ranks(tmp_path, 0, job=name)
    (tmp_path / "damaged/rank-00000/manifest.json").write_text("{")
    (tmp_path / "linked/rank-00001").symlink_to(tmp_path / "whole/rank-00000")
    damaged, linked, whole = find_jobs(tmp_path)
    assert "not a readable manifest" in damaged.problems[0] and "symbolic link" in linked.problems[0]
    assert (linked.folders[0].problem, whole.problems, whole.generation) == (None, [], 0)


@pytest.mark.parametrize("content", [b"\0" * 40, b"\xff\xff\n"])
def test_a_job_with_a_damaged_lock(tmp_path: Path, content: bytes) -> None:
    """It is listed, and removed; what the lock's notes alone had told stays unknown."""
    of_ranks(tmp_path, 0)
    (tmp_path / "default/rank-00000/lock").write_bytes(content)
    job = only(tmp_path)
    assert bool(job.problems) == (content[0] != 0) and remove_job(job, kept=False) == [] and tree(tmp_path) == set()


# ---- the residual of a training record: what is on storage is the record's, or is told from it


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each checksum two blocks."""
    monkeypatch.setattr(residual_file, "_PART_BYTES", 8192)


def record(store: StateStore, generation: int, values: NDArray[np.float32], content: bytes = b"") -> None:
    store.record_training(generation=generation, step=generation, content=content, has_steps=True, residual=values)


def trained(folder: Path, *, numel: int = NUMEL, **config: Any) -> list[NDArray[np.float32]]:
    """Leave a store of two generations with a record each; return the residuals."""
    store, residuals = create([folder], world_size=1, **config), []
    for generation in (0, 1):
        commit_generation(store, generation)
        residuals.append(memory(generation, numel))
        record(store, generation, residuals[-1])
        store.records.finish_residual()
        assert store.records.residual_failure is None
    store.close(remove=False)
    return residuals


def recovered(folder: Path) -> tuple[StateStore, list[TrainingRecord]]:
    """Return the store and the records of a training that resumes."""
    _, records = find_resumable([folder], job="default", rank=0)
    return recover_store([folder], newest=records[0].generation, training=records[0].number), records


def resumed(folder: Path) -> tuple[int, bytes]:
    """Return the step that a training resumes from, and the residual that it finds."""
    store, (newest, *_) = recovered(folder)
    found = np.empty(newest.residual_numel, np.float32)
    store.records.read_residual(found)
    store.close(remove=False)
    return newest.step, found.tobytes()


ENGINES = sorted(name for name, reason in native.io_engines() if reason is None)


@pytest.mark.parametrize(
    ("numel", "config"),
    [
        *((numel, {"durability": "step"}) for numel in (1, 1023, 1024, 2048, 2049)),
        (NUMEL, {"durability": "power"}),
        *((NUMEL, {"io_engine": engine}) for engine in ENGINES),
    ],
    ids=str,
)
def test_the_newest_one_is_found(tmp_path: Path, numel: int, config: dict[str, Any]) -> None:
    """The residual of the newest record comes back to the bit, whatever its length, and by every engine."""
    assert (1, trained(tmp_path, numel=numel, **config)[1].tobytes()) == resumed(tmp_path)


def test_it_waits_for_the_commit(tmp_path: Path) -> None:
    """A record of a step in flight begins no write: its residual is not in memory yet."""
    store = create([tmp_path], world_size=1)
    commit_generation(store, 0)
    values = memory(0)
    record(store, 1, values)
    store.records.write_residual(store.generation)
    assert store.records._residual_write is None
    commit_generation(store, 1)
    values += 1
    store.records.write_residual(store.generation)
    store.close(remove=False)
    assert resumed(tmp_path)[1] == values.tobytes()


def test_a_record_that_is_written_again_keeps_it(tmp_path: Path) -> None:
    """A record whose content is exchanged keeps number and residual. A kill within the exchange leaves it as it was."""
    residuals = trained(tmp_path)
    unfinished = tmp_path / "default/rank-00000/training-0.bin.new"
    unfinished.write_bytes(b"LSITRN01")
    unfinished.chmod(0o600)
    assert resumed(tmp_path) == (1, residuals[1].tobytes())
    store, (newest, before) = recovered(tmp_path)
    store.records.rewrite(lambda record: b"another content")
    store.close(remove=False)
    assert not unfinished.exists() and resumed(tmp_path)[1] == residuals[1].tobytes()
    store, records = recovered(tmp_path)
    assert records == [replace(newest, content=b"another content"), before]
    unfinished.write_bytes(b"LSITRN01")
    unfinished.chmod(0o600)
    store.close(remove=True)
    assert not (tmp_path / "default").exists()


@pytest.mark.parametrize("left", ["nothing", "the residual alone", "an older one"])
def test_a_kill_within_the_write(tmp_path: Path, left: str, attack: Attack) -> None:
    """What was not written to its end is left out: the training resumes one step earlier, as a listing says."""
    residuals = trained(tmp_path)
    path = tmp_path / "default/rank-00000/residual-0.bin"  # that of record 2, the newest
    whole, end = path.read_bytes(), -(-4 * NUMEL // 4096) * 4096
    if left == "nothing":
        path.write_bytes(bytes(len(whole)))
    elif left == "the residual alone":
        path.write_bytes(whole[:end] + bytes(len(whole) - end))
    else:
        path.write_bytes(whole[: end // 2] + (path.parent / "residual-1.bin").read_bytes()[end // 2 :])
    attack("kill while a residual is being written", tries=1, outcome="the residual before it is found")
    job = find_job(tmp_path, "default")
    assert job is not None and job.folders[0].resumable_step == 0
    assert scrub_rank([path.parent], rank=0, show=hidden).damaged == ()
    assert resumed(tmp_path) == (0, residuals[0].tobytes())


def test_residuals_that_were_lost(tmp_path: Path) -> None:
    """Without a residual of any record, a training is damaged, and not one that has taken no step."""
    trained(tmp_path)
    folder = tmp_path / "default/rank-00000"
    for path in folder.glob("residual-?.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    assert look_at(OpenFolder(folder)).is_damaged
    (sentence,) = scrub_rank([folder], rank=0, show=hidden).damaged
    with pytest.raises(StorageCorruptError, match=r"residual-0.bin' does not hold the residual of step 1") as caught:
        find_resumable([tmp_path], job="default", rank=0)
    assert caught.value.problem in sentence


@pytest.mark.filterwarnings("ignore:The training record")
@pytest.mark.parametrize("at", [0, 8191, 8192, 4 * NUMEL - 1, "magic", "checksum", "cut"])
def test_a_damaged_one(tmp_path: Path, at: int | str, attack: Attack) -> None:
    """A scrub names the damage. The record before is taken, with a warning; without one there is an error."""
    trained(tmp_path)
    path = tmp_path / "default/rank-00000/residual-0.bin"
    end = -(-4 * NUMEL // 4096) * 4096
    if at == "cut":
        path.write_bytes(path.read_bytes()[:-4096])
    else:
        flip(path, {"magic": end, "checksum": end + 65}.get(at, at) if isinstance(at, str) else at)
    (sentence,) = scrub_rank([path.parent], rank=0, show=hidden).damaged
    assert str(path) in sentence and "residual" in sentence
    with pytest.warns(UserWarning, match=r"residual.*Going on from step 0"):
        _, (taken,) = find_resumable([tmp_path], job="default", rank=0)
    assert taken.step == 0
    (path.parent / "training-1.bin").write_bytes(b"")
    with pytest.raises(StorageCorruptError, match="residual"):
        find_resumable([tmp_path], job="default", rank=0)
    attack("bit flip in a residual on storage", tries=1, outcome="told; the step before is resumed from, or an error")


def test_damage_within_a_read(tmp_path: Path) -> None:
    """A residual that is damaged after it was looked at is not taken over."""
    trained(tmp_path)
    store, _ = recovered(tmp_path)
    flip(tmp_path / "default/rank-00000/residual-0.bin", 4096)
    with pytest.raises(StorageCorruptError, match="residual"):
        store.records.read_residual(np.empty(NUMEL, np.float32))
    store.close(remove=True)


def test_one_of_another_run(tmp_path: Path) -> None:
    """After a resume, the residual of a record with the same number, but of the run before, is not taken for it."""
    trained(tmp_path)
    store = recover_store([tmp_path], newest=0, training=1)
    commit_generation(store, 1)
    store.records.write(generation=1, step=9, content=b"", has_steps=True, residual=memory(7))
    store.close(remove=False)  # before the residual was written
    assert resumed(tmp_path) == (0, memory(0).tobytes())


def test_the_space_that_is_asked_for(tmp_path: Path) -> None:
    """The two files take what was measured, belong to the store, and go with it."""
    (asked,) = space.measure_residual_space(tmp_path, numel=NUMEL)
    store = create([tmp_path], world_size=1)
    commit_generation(store, 0)
    record(store, 0, memory(0))
    files = sorted(tmp_path.rglob("residual-*.bin"))
    assert len(files) == 2 and {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert sum(path.stat().st_size for path in files) == asked.needed_bytes == residual_bytes(NUMEL)
    store.close(remove=True)
    assert not list(tmp_path.iterdir()) and space.measure_residual_space(tmp_path, numel=0) == []


# ---- records around a step that is rolled back


def found(store: StateStore) -> list[TrainingRecord]:
    """Return what a kill at this moment would leave to resume from, newest first."""
    records = read_training_records(store._folders[0].inside, identity=store.records._identity)
    return [record for record in records if record.generation <= store.generation]


def rolled_back(folder: Path) -> StateStore:
    """Return a store whose third step was recorded while it was in flight, and then rolled back."""
    store = create([folder], world_size=1)
    for generation in (0, 1):
        commit_generation(store, generation)
        record(store, generation, memory(generation), b"good")
        store.records.finish_residual()
    record(store, 2, memory(2), b"failed")
    store.forget_training()
    store.forget_training()  # a rollback may be repeated
    return store


def test_the_next_record_leaves_the_last_good_one(tmp_path: Path) -> None:
    """A loop that goes on after the error can be killed before its next step is committed, and resumes one back."""
    store = rolled_back(tmp_path)
    (newest, *_) = found(store)
    assert (newest.generation, newest.content) == (1, b"good")
    record(store, 2, memory(2), b"again")
    assert (newest.number, b"good") in {(one.number, one.content) for one in found(store)}
    commit_generation(store, 2)
    # Another rank may not have forgotten the record that failed: the new one is told from it.
    numbered = [(one.number, one.content) for one in found(store)]
    assert numbered == [(newest.number + 3, b"again"), (newest.number, b"good")]
    record(store, 3, memory(3), b"after")
    commit_generation(store, 3)
    assert [one.content for one in found(store)] == [b"after", b"again"]
    store.close(remove=True)


def test_a_record_that_is_written_again_is_the_last_good_one(tmp_path: Path) -> None:
    """What was recorded for the step that was rolled back does not come back beside another step's state."""
    store = rolled_back(tmp_path)
    store.records.rewrite(lambda record: b"good, again")
    commit_generation(store, 2)
    store.records.write_residual(store.generation)
    newest = found(store)[0]
    assert (newest.generation, newest.content) == (1, b"good, again")
    store.close(remove=False)
    assert resumed(tmp_path) == (1, memory(1).tobytes())
