"""Recovery: commit records, the generation that is found, and the stores that are refused."""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageFullError
from lightning_smartinfinity.storage import find_resumable, recover_store
from lightning_smartinfinity.storage.folders.manifest import read_manifest
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.io.files import OpenFile, write_all
from lightning_smartinfinity.storage.jobs.jobs import find_job
from lightning_smartinfinity.storage.jobs.removal import remove_job
from lightning_smartinfinity.storage.jobs.trainings import Condition, trainings_in
from lightning_smartinfinity.storage.records import record_writes
from lightning_smartinfinity.storage.records.sealed import crc32c
from lightning_smartinfinity.storage.records.training_record import TrainingRecord, read_training_records, record_name
from lightning_smartinfinity.storage.spread import Placement
from lightning_smartinfinity.storage.state.commit_record import (
    CommitRecord,
    decode_record,
    encode_record,
    read_records,
    record_bytes,
    write_record,
)
from lightning_smartinfinity.storage.state.parts import find_parts, look_at
from lightning_smartinfinity.storage.state.recovery import records_of
from lightning_smartinfinity.storage.state.scrub import scrub_rank
from tests.helpers import power_loss
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit_behind
from tests.storage.makers import (
    commit_generation,
    create,
    flip,
    flipped,
    killed_before,
    left,
    listed,
    manifest_with,
    recovered,
    tree,
    write_generation,
)


def test_newest_generation_is_found(tmp_path: Path) -> None:
    """Recovery restores the places, generations and step counts of the last commit.

    Extents that were written without a commit record are ignored, without a warning.
    """
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders)
    for generation in range(4):
        commit_generation(store, generation)
    write_generation(store, 4, tasklets=[0, 3])
    store.close(remove=False)
    with warnings.catch_warnings(action="error"):
        store = recover_store(folders)
    assert (store.generation, store.steps.tolist(), store.tasklet_generations.tolist()) == (3, [3] * 2, [3] * 5)
    assert [each.tolist() for each in store.placement] == [[0, 1, 0, 1, 0], [3, 2, 4, 3, 5]]
    store.close(remove=True)


def test_newest_generation_common_to_all_ranks(tmp_path: Path) -> None:
    """Recovery up to a given generation takes that one, and newer ones never come back."""
    left(tmp_path, generations=3)
    assert [recovered(tmp_path, newest=newest, remove=False) for newest in (1, None)] == [1, 1]
    with pytest.raises(StorageCorruptError, match="no commit record up to generation 0"):
        recover_store([tmp_path], newest=0)


def test_record_whose_extents_were_lost(tmp_path: Path) -> None:
    """If a record survived a power loss without its extents, the previous generation is taken with a warning."""
    path = left(tmp_path, generations=3, steps=range(3)) / "state.bin"
    store = recover_store([tmp_path], training=3)
    offset = store.extents.place_offset(int(store.placement.positions[2])) + store.extents.extents[2].nbytes - 128
    store.close(remove=False)
    content = path.read_bytes()
    path.write_bytes(content[:offset] + bytes(128) + content[offset + 128 :])
    with pytest.warns(UserWarning, match=r"generation 2 of tasklet 2.*\. Going on from step 1\."):
        assert [record.step for record in find_resumable([tmp_path], job="default", rank=0)[1]] == [1]
    with pytest.warns(UserWarning, match=r"generation 2 of tasklet 2.*\. Going on from generation 1\."):
        assert recovered(tmp_path) == 1


Change: TypeAlias = Callable[[dict[str, Any]], bytes]
FORMAT = b'{"format": "lightning-smartinfinity optimizer state", "version": '
NONE = "not a readable manifest"


def values(**changes: Any) -> Change:
    return lambda manifest: manifest_with(manifest | changes)


def layout(**changes: Any) -> Change:
    return lambda manifest: manifest_with(manifest | {"layout": manifest["layout"] | changes})


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (values(version=2), StorageCorruptError, "format version 2"),
        (
            values(version=6, package="9.9.9"),
            StorageError,
            "by a newer version of lightning-smartinfinity, 9.9.9, in format version 6.",
        ),
        *(
            pytest.param(
                lambda manifest, version=version: manifest_with(manifest).replace(
                    b'"version": 5', b'"version": %d' % version
                ),
                StorageCorruptError,
                "does not match its checksum",
                id=f"damaged version {version}",
            )
            for version in (2, 3, 99)
        ),
        (values(state_format=[]), StorageError, "in the format []"),
        (values(rank=1), StorageError, "belongs to another store"),
        *(
            pytest.param(values(**changes), StorageCorruptError, NONE, id=str(changes))
            for changes in (
                {"format": "another"},
                {"layout": {"numel": -1}},
                {"job": "no uuid"},
                {"job": 5},
                {"arrays": ["master", "exp_avg"]},
                {"durability": "none"},
                {"folders": [1 << 63]},
                {"folders": ["/nvme\0"]},
                {"folders": ["/nvme\ud800"]},
            )
        ),
        *(
            pytest.param(layout(**numbers), StorageCorruptError, NONE, id=str(numbers))
            for numbers in (
                {"numel": 10**30},
                {"tasklet_numel": 8 << 60},
                {"numel": 1e999},
                {"num_devices": 1 << 40},
                {"num_tasklets": 3},
            )
        ),
        pytest.param(
            layout(numel=1 << 49), StorageCorruptError, "commit.bin' holds no commit record", id="too many tasklets"
        ),
        *(
            pytest.param(lambda _, content=content: content, StorageCorruptError, NONE, id=name)
            for name, content in {
                "not text": b"\xff\xfe",
                "a list": b"[]",
                "brackets without end": b"[" * 100_000,
                "a number beyond any float": FORMAT + b"1e999}",
                "a version of too many digits": FORMAT + b"9" * 5000 + b"}",
            }.items()
        ),
    ],
)
def test_manifest_of_another(tmp_path: Path, change: Change, kind: type[StorageError], message: str) -> None:
    """Newer, older, damaged or foreign manifests are refused with path and remedy, before memory is taken for them."""
    path = left(tmp_path) / "manifest.json"
    path.write_bytes(change(json.loads(path.read_text())))
    with pytest.raises(StorageError, match=re.escape(message)) as caught:
        recover_store([tmp_path])
    assert type(caught.value) is kind and "rank-00000" in caught.value.problem and caught.value.remedy


def test_every_bit_of_a_manifest(tmp_path: Path, attack: Attack) -> None:
    """Whichever bit of it flips, the store is refused, and the error names the file."""
    path = left(tmp_path, generations=0) / "manifest.json"
    content, folder, told = path.read_bytes(), OpenFolder(path.parent), ""
    flips = range(0, 8 * len(content), 7)  # each bit of some byte, and each byte
    for number in flips:
        path.write_bytes(flipped(content, number // 8, number % 8))
        with pytest.raises(StorageCorruptError, match=r"manifest\.json") as caught:
            read_manifest(folder)
        told += str(caught.value)
    assert "does not match its checksum" in told and "TransferConfig(job=...)" in told
    attack(
        "bit flip in a manifest, before recovery or a resume", tries=len(flips), outcome="refused by the file's name"
    )


def test_manifest_larger_than_any(tmp_path: Path) -> None:
    """It is refused before it is read: a file can have more bytes than the machine has memory."""
    (tmp_path / "manifest.json").touch()
    os.truncate(tmp_path / "manifest.json", 1 << 41)
    with pytest.raises(StorageCorruptError, match=NONE):
        read_manifest(OpenFolder(tmp_path))


@pytest.mark.parametrize(
    "changed",
    [
        {"tasklet_generations": -1},
        {"tasklet_generations": 1},
        {"devices": 1},
        {"positions": 0xFFFFFFFF},
        {"steps": -1},
    ],
    ids=str,
)
def test_record_that_was_made_up(changed: dict[str, int], tmp_path: Path) -> None:
    """A record with a right checksum and impossible places, generations or counts is refused."""
    folder = OpenFolder(left(tmp_path))
    job = read_manifest(folder).job
    ((record,), _) = read_records(folder, num_tasklets=5, num_parameters=2, job=job)
    ((name, value),) = changed.items()
    column = getattr(record, name, None) if hasattr(record, name) else getattr(record.placement, name)
    column[-1] = value
    write_record(folder, record, job=job, flush=False)
    with pytest.raises(StorageCorruptError, match=r"contradicts itself|does not hold"):
        recover_store([tmp_path])


def test_folders_must_be_those_of_the_store(tmp_path: Path) -> None:
    """Folders in another order, too few or many, or of another store are refused; the error names the right ones.

    They are those that have the parts now: mounts may have been exchanged, or moved up when a drive failed.
    """
    a, b, c, d = [tmp_path / name for name in "abcd"]
    left(a, b)
    left(c)

    def refused(*named: Path) -> str:
        with pytest.raises(StorageError) as caught:
            recover_store(named)
        return str(caught.value)

    for wrong in ([b, a], [a], [a, c], [a, b, d], [b, a, d]):
        assert refused(*wrong).endswith(f": storage={[str(a), str(b)]!r}.")
    assert "is in 2 storage folders; 3 named" in refused(a, b, d) and recovered(a, b, remove=False) == 0
    for old, new in ((a, d), (b, a), (d, b)):
        old.rename(new)
    right = f": storage={[str(b), str(a)]!r}."
    assert refused(a, b).endswith(right)
    assert all(job.problems[0].endswith(f"in this order{right}") for job in listed(a, b))
    b.rename(d)
    said = refused(a, b)
    assert said.startswith(f"{str(b / 'default/rank-00000')!r} cannot be found")
    assert said.endswith(f"the other folders: storage={[str(a)]!r}.")
    d.rename(b)
    assert recovered(b, a) == 0


def test_nothing_to_recover(tmp_path: Path) -> None:
    """A missing job, a rank without files and a store that was never written are refused with the path."""
    with pytest.raises(
        StorageError, match=r"no optimizer state in .*other/rank-00000.* another machine .* copy it here"
    ):
        recover_store([tmp_path], job="other")
    (tmp_path / "default" / "rank-00000").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"Reading .*manifest\.json.*No such file"):
        recover_store([tmp_path])
    assert not (tmp_path / "default" / "rank-00000" / "lock").exists()
    left(tmp_path / "empty", generations=0)
    with pytest.raises(StorageCorruptError, match=r"holds no commit record.*checkpoint"):
        recover_store([tmp_path / "empty"])


def recorded(folder: Path, *, num_records: int, num_later: int = 0) -> Path:
    """Leave a store with training records and further generations; return the rank's folder."""
    return left(folder, generations=num_records + num_later, steps=range(num_records), content=b"what a loop needs")


fails = Mock(side_effect=StorageFullError("A test has no space for the record.", "Let it go on."))


def test_a_training_record_that_fails_has_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has the number that the same record has on ranks where none has failed."""
    store = create([tmp_path])
    for generation in range(4):
        commit_generation(store, generation)
        with monkeypatch.context() as patch, suppress(StorageFullError):
            if generation in (1, 2):
                patch.setattr(record_writes, "write_training_record", fails)
            store.record_training(generation=generation, step=generation, content=b"", has_steps=True)
    store.close(remove=False)
    _, records = find_resumable([tmp_path], job="default", rank=0)
    assert [(record.number, record.step) for record in records] == [(4, 3)]


def test_a_record_that_is_withdrawn_spares_the_one_before(tmp_path: Path) -> None:
    """So do a write at an interval that fails and a step that is rolled back then: the next record replaces theirs.

    An interrupt after the commit withdraws nothing.
    """
    store = create([tmp_path])
    store.records.hold()
    for generation, error in ((2, KeyboardInterrupt), (4, StorageError("The disk is broken.", "")), (4, None)):
        is_committed = error is KeyboardInterrupt
        store.records.write(generation=generation, step=generation, content=b"", has_steps=True, residual=None)
        with suppress(KeyboardInterrupt, StorageError), store.records.storing(lambda done=is_committed: done):
            if error is not None:
                raise error
        if error is not None:
            store.records.forget_behind(generation)
    found = read_training_records(OpenFolder(tmp_path / "default/rank-00000"), identity=store.identity)
    store.close(remove=True)
    assert [(record.number, record.step) for record in found] == [(4, 4), (1, 2)]


def test_a_kill_before_the_first_training_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves an empty file, which is no damage: a training from a checkpoint begins with a later generation."""
    monkeypatch.setattr(record_writes, "write_training_record", fails)
    store = create([tmp_path])
    for generation in range(2):
        commit_generation(store, generation)
    with pytest.raises(StorageFullError):
        store.record_training(generation=1, step=9, content=b"", has_steps=False)
    with pytest.raises(StorageFullError):
        store.records.end("a callback holds a lock.")
    store.close(remove=False)
    assert not look_at(OpenFolder(tmp_path / "default/rank-00000")).is_damaged


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def refusal(folder: Path) -> str:
    """Return why a training cannot be resumed. A scrub reports it if it is damage."""
    with pytest.raises(StorageError) as caught:
        find_resumable([folder], job="default", rank=0)
    assert "Begin anew, without resuming from storage (leave ckpt_path out)" in caught.value.remedy
    damaged = scrub_rank([folder / "default" / "rank-00000"], rank=0, show=hidden).damaged
    assert damaged == ((str(caught.value),) if isinstance(caught.value, StorageCorruptError) else ())
    return caught.value.problem


def test_a_flipped_bit_in_a_training_record(tmp_path: Path, attack: Attack) -> None:
    """A scrub names the record that is damaged, whichever bit it is. A resume goes on from the other one."""
    folder, tries, resumed = recorded(tmp_path, num_records=2), 0, 0
    records = {record_name(record.number): record for record in find_resumable([tmp_path], job="default", rank=0)[1]}
    assert len(records) == 2
    for name, other in permutations(records):
        content = (folder / name).read_bytes()
        for at in range(len(content)):
            (folder / name).write_bytes(flipped(content, at, at % 8))
            (sentence,) = scrub_rank([folder], rank=0, show=hidden).unknown
            assert name in sentence and "goes on from step" in sentence, at
            tries += 1
            if at % 31 == 0:  # a resume reads the state, too
                with pytest.warns(UserWarning, match=rf"{name}' is damaged, or a kill .* goes on from step \d\."):
                    assert find_resumable([tmp_path], job="default", rank=0)[1] == [records[other]], at
                resumed += 1
        (folder / name).write_bytes(content)
    assert scrub_rank([folder], rank=0, show=hidden).unknown == ()
    attack("bit flip in a training record, before a scrub", tries=tries, outcome="the scrub names the record")
    outcome = "the other record is resumed from, with a warning"
    attack("bit flip in a training record, before a resume", tries=resumed, outcome=outcome)


def test_training_records_whose_content_is_not_ours(tmp_path: Path) -> None:
    """A scrub and a resume check the content of each record that a training may resume from."""
    folder = recorded(tmp_path, num_records=2)

    def refuse(record: TrainingRecord) -> None:
        assert record.content == b"what a loop needs"
        raise StorageCorruptError(f"Step {record.step} cannot be read.", "Resume from a checkpoint.")

    damaged = scrub_rank([folder], rank=0, show=hidden, check=refuse).damaged
    assert [("training-0.bin" in one, "training-1.bin" in one) for one in damaged] == [(True, False), (False, True)]
    with pytest.raises(StorageCorruptError, match=r"Step 1 cannot be read\."):
        find_resumable([tmp_path], job="default", rank=0, check=refuse)


def test_training_records_of_a_newer_version(tmp_path: Path) -> None:
    """They are refused in words and no damage: nothing moves, and a listing and a scrub name the version that reads."""
    folder = recorded(tmp_path, num_records=2)
    for file in folder.glob("training-*.bin"):
        newer = (
            file.read_bytes()[:8] + (99).to_bytes(4, "little") + b"9.9.9".ljust(32, b"\0") + file.read_bytes()[44:-4]
        )
        file.write_bytes(newer + crc32c(newer).to_bytes(4, "little"))
    before, said = power_loss.content(tmp_path), re.escape("lightning-smartinfinity, 9.9.9, in format version 99.")
    for look in (partial(find_resumable, job="default", rank=0), partial(find_parts, jobs=["default"])):
        with pytest.raises(StorageError, match=rf"{said}.*Use version 9\.9\.9.*--remove default"):
            look([tmp_path])
    job = find_job(tmp_path, "default")
    assert job is not None and job.resumable_step is None and re.search(said, job.problems[0])
    assert re.search(said, scrub_rank([folder], rank=0, show=hidden).unknown[0])
    assert power_loss.content(tmp_path) == before
    flip_bit_behind(b"LSITRN01", folder / "training-1.bin")
    with pytest.raises(StorageError, match=said):
        find_resumable([tmp_path], job="default", rank=0)
    assert remove_job(job, kept=False) == [] and not folder.exists()


def test_training_records_of_no_use(tmp_path: Path) -> None:
    """The error says which record is damaged, where records have ended, or that later generations have come."""
    one, both, late, ended = (tmp_path / name for name in ("one", "both", "late", "ended"))
    damage(recorded(one, num_records=4, num_later=1) / "training-0.bin")
    assert re.search(r"record '.*training-0.bin' is damaged, and later steps .* \(step 2\)", refusal(one))
    recorded(both, num_records=4)
    for file in both.rglob("training-*.bin"):
        damage(file)
    assert re.search(r"records '.*0.bin' and '.*1.bin' are damaged\.", refusal(both))
    recorded(late, num_records=2, num_later=2)
    assert "after its last record (step 1): several optimizer steps" in refusal(late)
    recorded(ended, num_records=2)
    store = recover_store([ended], training=2)
    store.records.end("a callback holds a lock.")
    store.close(remove=False)
    assert refusal(ended).endswith("wrote no training records after step 1: a callback holds a lock.")


@pytest.mark.parametrize("name", ["manifest.json", "commit.bin"])
def test_a_file_that_is_missing_before_the_first_step(name: str, tmp_path: Path) -> None:
    """No training is lost with it."""
    folder = left(tmp_path, generations=2, world_size=1)
    (folder / name).unlink()
    assert not (look_at(OpenFolder(folder)).is_damaged or listed(tmp_path)[0].damaged)


def removed(way: str, folders: Sequence[Path]) -> None:
    """Remove a store by closing it, by making another one in its place, or as the command does."""
    if way == "close":
        recovered(*folders)
    elif way == "create":
        create(folders)
    elif (job := find_job(folders[0], "default")) is not None:
        remove_job(job, kept=False)


@pytest.mark.parametrize("way", ["close", "create", "remove_job"])
def test_a_kill_while_a_store_is_removed(way: str, tmp_path: Path) -> None:
    """What is left is whole, or no training of which a file was lost, and the next store replaces it."""
    was_killed, moment = True, 0
    while was_killed:
        folders = [tmp_path / f"{name}{moment}" for name in ("a" if way == "remove_job" else "ab")]
        left(*folders, generations=2, steps=range(2), world_size=1)
        was_killed = killed_before(moment, partial(removed, way, folders))
        (training,) = trainings_in(find_parts(folders, ["default"]), "default") or [None]
        moment += 1
        if training is not None:
            first = Condition.RESUMABLE if moment <= 2 else Condition.NO_STEP
            assert training.condition is (first if was_killed else Condition.NO_STEP), moment
        create(folders).close(remove=True)
        assert not any(map(tree, folders))
    assert moment > 5


# ---- commit records

JOB = bytes(range(16))


@st.composite
def records(draw: st.DrawFn) -> CommitRecord:
    tasklets, parameters = draw(st.integers(0, 20)), draw(st.integers(0, 5))
    numbers = st.integers(0, (1 << 62))
    return CommitRecord(
        generation=draw(numbers),
        placement=Placement(
            np.array(draw(st.lists(st.integers(0, 7), min_size=tasklets, max_size=tasklets)), np.uint16),
            np.array(draw(st.lists(st.integers(0, 1 << 31), min_size=tasklets, max_size=tasklets)), np.uint32),
        ),
        tasklet_generations=np.array(draw(st.lists(numbers, min_size=tasklets, max_size=tasklets)), np.int64),
        steps=np.array(draw(st.lists(numbers, min_size=parameters, max_size=parameters)), np.int64),
    )


def decode(content: bytes, like: CommitRecord, *, job: bytes = JOB) -> CommitRecord | None:
    return decode_record(content, num_tasklets=len(like.tasklet_generations), num_parameters=len(like.steps), job=job)


def columns_of(record: CommitRecord) -> list[NDArray[Any]]:
    return [*record.placement, record.tasklet_generations, record.steps]


@given(records())
def test_record_survives_encoding(record: CommitRecord) -> None:
    """Every field survives encoding, and the record fits its place."""
    content = encode_record(record, job=JOB)
    assert len(content) <= record_bytes(len(record.tasklet_generations), len(record.steps))
    decoded = decode(content + bytes(100), record)
    assert decoded is not None and decoded.generation == record.generation
    for found, column in zip(columns_of(decoded), columns_of(record), strict=True):
        assert found.dtype == column.dtype and np.array_equal(found, column)


@given(records(), st.data())
def test_damaged_record_is_no_record(record: CommitRecord, data: st.DataObject) -> None:
    """A record with a flipped bit, a missing end or another job counts as absent."""
    content = bytearray(encode_record(record, job=JOB))
    cut = data.draw(st.integers(0, len(content) - 1))
    assert decode(bytes(content[:cut]), record) is None
    assert decode(bytes(content[:cut]) + bytes(len(content) - cut), record) is None or not any(content[cut:])
    assert decode(bytes(content), record, job=bytes(16)) is None
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert decode(bytes(content), record) is None


RECORD = range(56 + 5 * 14 + 2 * 8 + 4)


def three_generations(folder: Path) -> Path:
    """Return the commit records of a closed store; that of generation 2 lies first."""
    return left(folder, generations=3, world_size=1) / "commit.bin"


def recovered_silently(folder: Path) -> int:
    with warnings.catch_warnings(action="error"):
        return recovered(folder)


DAMAGED = {
    **{f"bit of byte {at}": partial(flipped, at=at) for at in RECORD[::9]},
    "record torn": lambda content: content[:100] + bytes(4096 - 100) + content[4096:],
    "block never written": lambda content: bytes(4096) + content[4096:],
    "block of the other half": lambda content: 2 * content[4096:],
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_the_newest_record_cannot_be_read(damage: str, tmp_path: Path) -> None:
    """The generation before is taken with a warning that names file and generation. The record never comes back."""
    path = three_generations(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(DAMAGED[damage](whole))
    said = rf"{path}' was torn by a power loss or damaged since\. Going on from generation 1\."
    (scrubbed,) = scrub_rank([path.parent], rank=0, show=hidden).unknown
    assert re.search(said.replace("Going on from generation 1", "Generation 1 was read"), scrubbed)
    with pytest.warns(UserWarning, match=said):
        assert recovered(tmp_path, remove=False) == 1
    assert path.read_bytes()[4096:] == whole[4096:] and recovered_silently(tmp_path) == 1


def test_no_record_can_be_read(tmp_path: Path) -> None:
    """The error says what may have happened, as the warning does."""
    path = three_generations(tmp_path)
    for at in (60, 4096 + 60):
        flip(path, at)
    with pytest.raises(StorageCorruptError, match="torn by a power loss or damaged since"):
        recover_store([tmp_path])


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_record_that_was_erased(last: int, tmp_path: Path) -> None:
    """A commit that was rolled back, or that never came, leaves nothing to warn of or to report."""
    store, folder = create([tmp_path], world_size=1), tmp_path / "default/rank-00000"
    for generation in range(last + 2):
        commit_generation(store, generation)
        assert records_of(OpenFolder(folder), store.manifest).problem is None
    store.revert()
    store.close(remove=False)
    assert scrub_rank([folder], rank=0, show=hidden).unknown == () and recovered_silently(tmp_path) == last


def test_short_transfers_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer goes on where the one before it stopped; only the end of the file ends a read."""
    pwrite, preadv, content = os.pwrite, os.preadv, bytes(range(100))
    monkeypatch.setattr(os, "pwrite", lambda file, part, offset: pwrite(file, part[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:7]], offset))
    file = OpenFile(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file.write_all(memoryview(content), 5)
    assert file.path.read_bytes() == bytes(5) + content
    memory = memoryview(bytearray(200))
    assert file.read_all(memory, 5) == 100 and bytes(memory[:100]) == content
    file.close()
    assert file.descriptor == -1


def test_a_write_that_writes_nothing() -> None:
    """It raises an error instead of leaving a part out."""
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_all(lambda part, offset: 0, memoryview(b"content"))
