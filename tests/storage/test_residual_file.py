"""The residual of a training record: what is on storage is the record's, or is told from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageCorruptError
from lightning_smartinfinity.storage import StateStore, find_resumable, recover_store
from lightning_smartinfinity.storage.jobs.jobs import find_job
from lightning_smartinfinity.storage.records import residual_file
from lightning_smartinfinity.storage.records.residual_file import residual_bytes
from lightning_smartinfinity.storage.records.training_record import TrainingRecord, read_training_records
from lightning_smartinfinity.storage.state import space
from lightning_smartinfinity.storage.state.scrub import scrub_rank
from tests.helpers.attacks import Attack
from tests.storage.makers import NUMEL, commit_generation, create, flip
from tests.storage.makers import residual_memory as memory


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


def resumed(folder: Path) -> tuple[int, NDArray[np.float32]]:
    """Return the step that a training resumes from, and the residual that it finds."""
    _, (newest, *_) = find_resumable([folder], job="default", rank=0)
    store = recover_store([folder], newest=newest.generation, training=newest.number)
    found = np.empty(newest.residual_numel, np.float32)
    store.records.read_residual(found)
    store.close(remove=False)
    return newest.step, found


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
    residuals = trained(tmp_path, numel=numel, **config)
    step, found = resumed(tmp_path)
    assert step == 1 and found.tobytes() == residuals[1].tobytes()


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
    assert resumed(tmp_path)[1].tobytes() == values.tobytes()


def test_a_record_that_is_written_again_keeps_it(tmp_path: Path) -> None:
    """A record whose content is exchanged keeps number and residual. A kill within the exchange leaves it as it was."""
    residuals = trained(tmp_path)
    unfinished = tmp_path / "default/rank-00000/training-0.bin.new"
    unfinished.write_bytes(b"LSITRN01")
    unfinished.chmod(0o600)
    step, found = resumed(tmp_path)
    assert step == 1 and found.tobytes() == residuals[1].tobytes()
    _, (newest, before) = find_resumable([tmp_path], job="default", rank=0)
    store = recover_store([tmp_path], newest=newest.generation, training=newest.number)
    store.records.rewrite(b"another content")
    store.close(remove=False)
    assert not unfinished.exists()
    assert find_resumable([tmp_path], job="default", rank=0)[1] == [replace(newest, content=b"another content"), before]
    assert resumed(tmp_path)[1].tobytes() == residuals[1].tobytes()
    store = recover_store([tmp_path], newest=newest.generation, training=newest.number)
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
        other = (path.parent / "residual-1.bin").read_bytes()
        path.write_bytes(whole[: end // 2] + other[end // 2 :])
    attack("kill while a residual is being written", tries=1, outcome="the residual before it is found")
    job = find_job(tmp_path, "default")
    assert job is not None and job.folders[0].resumable_step == 0
    assert scrub_rank([path.parent], rank=0, show=hidden).damaged == ()
    step, found = resumed(tmp_path)
    assert step == 0 and found.tobytes() == residuals[0].tobytes()


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
    _, (newest, *_) = find_resumable([tmp_path], job="default", rank=0)
    store = recover_store([tmp_path], newest=1, training=newest.number)
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
    step, found = resumed(tmp_path)
    assert step == 0 and found.tobytes() == memory(0).tobytes()


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
    assert [one.content for one in found(store)] == [b"again", b"good"]
    # Another rank may not have forgotten the record that failed: the new one is told from it.
    assert found(store)[0].number == newest.number + 3
    record(store, 3, memory(3), b"after")
    commit_generation(store, 3)
    assert [one.content for one in found(store)] == [b"after", b"again"]
    store.close(remove=True)


def test_a_record_that_is_written_again_is_the_last_good_one(tmp_path: Path) -> None:
    """What was recorded for the step that was rolled back does not come back beside another step's state."""
    store = rolled_back(tmp_path)
    store.records.rewrite(b"good, again")
    commit_generation(store, 2)
    store.records.write_residual(store.generation)
    newest = found(store)[0]
    assert (newest.generation, newest.content) == (1, b"good, again")
    store.close(remove=False)
    step, residual = resumed(tmp_path)
    assert step == 1 and residual.tobytes() == memory(1).tobytes()
