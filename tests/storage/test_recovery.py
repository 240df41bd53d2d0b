"""Recovery: the generation that is found, and the stores that are refused."""

from __future__ import annotations

import json
import os
import re
import struct
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageFullError
from lightning_smartinfinity.storage import find_resumable, recover_store
from lightning_smartinfinity.storage.folders.manifest import read_manifest
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.records import training_record
from lightning_smartinfinity.storage.state.commit_record import (
    read_records,
    write_record,
)
from tests.storage.makers import commit_generation, create, created, manifest_with, write_generation


def test_newest_generation_is_found(tmp_path: Path) -> None:
    """Recovery restores the places, generations and step counts of the last commit."""
    store = create([tmp_path / "a", tmp_path / "b"])
    for generation in range(4):
        commit_generation(store, generation)
    store.close(remove=False)
    store = recover_store([tmp_path / "a", tmp_path / "b"])
    assert store.generation == 3
    assert store.placement.devices.tolist() == [0, 1, 0, 1, 0]
    assert store.placement.positions.tolist() == [3, 2, 4, 3, 5]
    assert store.tasklet_generations.tolist() == [3] * store.extents.num_tasklets
    assert store.steps.tolist() == [3, 3]
    store.close(remove=True)


def test_newest_generation_common_to_all_ranks(tmp_path: Path) -> None:
    """Recovery up to a given generation takes that one, and newer ones never come back."""
    store = create([tmp_path])
    for generation in range(3):
        commit_generation(store, generation)
    store.close(remove=False)
    for newest in (1, None):
        store = recover_store([tmp_path], newest=newest)
        assert store.generation == 1
        store.close(remove=False)
    with pytest.raises(StorageCorruptError, match="no commit record up to generation 0"):
        recover_store([tmp_path], newest=0)


def test_generation_that_was_being_written(tmp_path: Path) -> None:
    """Extents that were written without a commit record are ignored."""
    store = create([tmp_path])
    for generation in range(2):
        commit_generation(store, generation)
    write_generation(store, 2, tasklets=[0, 3])
    store.close(remove=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = recover_store([tmp_path])
    assert store.generation == 1
    store.close(remove=True)


def test_record_whose_extents_were_lost(tmp_path: Path) -> None:
    """If a record survived a power loss without its extents, the previous generation is taken with a warning."""
    store = create([tmp_path])
    for generation in range(3):
        commit_generation(store, generation)
    offset = store.extents.place_offset(int(store.placement.positions[2])) + store.extents.extents[2].nbytes - 128
    path = Path(store.files[0].path)
    store.close(remove=False)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes(128))
    with pytest.warns(UserWarning, match=r"generation 2 of tasklet 2.*\. Going on from generation 1\."):
        store = recover_store([tmp_path])
    assert store.generation == 1
    store.close(remove=True)


def test_store_without_any_generation(tmp_path: Path) -> None:
    """A store that was never written is refused with a remedy."""
    create([tmp_path]).close(remove=False)
    with pytest.raises(StorageCorruptError, match="holds no commit record") as caught:
        recover_store([tmp_path])
    assert "checkpoint" in caught.value.remedy


def test_trailer_is_as_documented(tmp_path: Path) -> None:
    """The native core writes the 128-byte trailer that docs/bytes_on_storage.md documents."""
    with created([tmp_path]) as store:
        commit_generation(store, 0)
        extent = store.extents.extents[4]
        offset = store.extents.place_offset(4) + extent.nbytes - 128
        trailer = Path(store.files[0].path).read_bytes()[offset : offset + 128]
        fields = struct.unpack("<8sII16sIIQQQQ", trailer[:72])
        expected = (b"LSIEXT01", 1, 0, store.identity.job, 0, 3, 4, 0, extent.numel, extent.nbytes)
        assert fields == expected
        assert trailer[104:124] == bytes(20)


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "default" / "rank-00000" / "manifest.json"
    path.write_bytes(manifest_with(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "format version 2"),
        ({"version": 5}, "written by a newer version of this package, in format version 5"),
        ({"format": "another"}, "not a readable manifest"),
        ({"layout": {"numel": -1}}, "not a readable manifest"),
        ({"job": "no uuid"}, "not a readable manifest"),
        ({"job": 5}, "not a readable manifest"),
        ({"arrays": ["master", "exp_avg"]}, "not a readable manifest"),
        ({"state_format": []}, "in the format []"),
        ({"durability": "none"}, "not a readable manifest"),
        ({"rank": 1}, "belongs to another store"),
    ],
)
def test_manifest_of_another_format(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Newer, older, damaged or foreign manifests are refused with path and remedy."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    change_manifest(tmp_path, **changes)
    with pytest.raises(StorageError, match=re.escape(message)) as caught:
        recover_store([tmp_path])
    not_damaged = "newer" in message or "state_format" in changes
    assert isinstance(caught.value, StorageCorruptError) is not not_damaged
    assert "rank-00000" in caught.value.problem
    assert caught.value.remedy


FORMAT = b'{"format": "lightning-smartinfinity optimizer state", "version": '
MANIFESTS = {
    "not text": b"\xff\xfe",
    "a list": b"[]",
    "brackets without end": b"[" * 100_000,
    "a number beyond any float": FORMAT + b"1e999}",
    "a version of too many digits": FORMAT + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_that_is_none(name: str, tmp_path: Path) -> None:
    """Whatever a manifest holds, the error is ours and names the path."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    path = tmp_path / "default" / "rank-00000" / "manifest.json"
    path.write_bytes(MANIFESTS[name])
    with pytest.raises(StorageCorruptError, match=r"manifest\.json' is not a readable manifest"):
        recover_store([tmp_path])


def test_every_bit_of_a_manifest(tmp_path: Path) -> None:
    """Whichever bit of it flips, the store is refused, and the error names the file; only what was written is read."""
    create([tmp_path]).close(remove=False)
    path = tmp_path / "default" / "rank-00000" / "manifest.json"
    content, folder = path.read_bytes(), OpenFolder(path.parent)
    for number in range(0, 8 * len(content), 7):  # each bit of some byte, and each byte
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        path.write_bytes(changed)
        with pytest.raises(StorageCorruptError, match=r"manifest\.json") as caught:
            read_manifest(folder)
        assert caught.value.remedy
    path.write_bytes(content)
    read_manifest(folder)


@pytest.mark.parametrize("name", ["rank", "num_slots", "keep"])
def test_a_value_of_a_manifest_that_still_parses(name: str, tmp_path: Path) -> None:
    """A number that became another one is refused with file and remedy."""
    create([tmp_path]).close(remove=False)
    path = tmp_path / "default" / "rank-00000" / "manifest.json"
    content = path.read_text()
    changed = re.sub(rf'"{name}": (\w+)', f'"{name}": 1', content)
    assert json.loads(changed) != json.loads(content)
    path.write_text(changed)
    with pytest.raises(StorageCorruptError, match=r"manifest\.json' does not match its checksum") as caught:
        read_manifest(OpenFolder(path.parent))
    assert "TransferConfig(job=...)" in caught.value.remedy


def test_a_manifest_of_the_version_before(tmp_path: Path) -> None:
    """A store whose manifest has no checksum, as version 3 had none, is still read."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    path = tmp_path / "default" / "rank-00000" / "manifest.json"
    values = json.loads(path.read_text())
    del values["crc32"]
    path.write_text(json.dumps(values | {"version": 3}, indent=1))
    recovered = recover_store([tmp_path])
    assert recovered.generation == 0
    recovered.close(remove=True)


def test_manifest_larger_than_any(tmp_path: Path) -> None:
    """It is refused before it is read: a file can have more bytes than the machine has memory."""
    path = tmp_path / "manifest.json"
    path.touch()
    os.truncate(path, 1 << 41)
    with pytest.raises(StorageCorruptError, match="not a readable manifest"):
        read_manifest(OpenFolder(tmp_path))


@pytest.mark.parametrize(
    "numbers",
    [{"numel": 10**30}, {"tasklet_numel": 8 << 60}, {"numel": 1e999}, {"num_devices": 1 << 40}, {"num_tasklets": 3}],
    ids=str,
)
def test_manifest_with_impossible_numbers(numbers: dict[str, Any], tmp_path: Path) -> None:
    """Numbers that no store has are refused before memory is taken for them."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    path = tmp_path / "default" / "rank-00000" / "manifest.json"
    layout = json.loads(path.read_text())["layout"]
    change_manifest(tmp_path, layout=layout | numbers)
    with pytest.raises(StorageCorruptError, match="not a readable manifest"):
        recover_store([tmp_path])


def test_manifest_of_more_tasklets_than_the_record_has_room_for(tmp_path: Path) -> None:
    """The error names the record's file. No memory is taken for the tasklets."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    path = tmp_path / "default" / "rank-00000" / "manifest.json"
    change_manifest(tmp_path, layout=json.loads(path.read_text())["layout"] | {"numel": 1 << 49})
    with pytest.raises(StorageCorruptError, match=r"commit\.bin' holds no commit record"):
        recover_store([tmp_path])


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
    store = create([tmp_path])
    commit_generation(store, 0)
    tasklets, steps = len(store.placement.positions), len(store.manifest.description.parameters)
    job = store.manifest.job
    store.close(remove=False)
    folder = OpenFolder(tmp_path / "default" / "rank-00000")
    ((record,), _) = read_records(folder, num_tasklets=tasklets, num_parameters=steps, job=job)
    ((name, value),) = changed.items()
    column = getattr(record, name, None) if hasattr(record, name) else getattr(record.placement, name)
    column[-1] = value
    write_record(folder, record, job=job, flush=False)
    with pytest.raises(StorageCorruptError, match=r"contradicts itself|does not hold"):
        recover_store([tmp_path])


def test_folders_must_be_those_of_the_store(tmp_path: Path) -> None:
    """Folders in another order, too few folders, or a folder of another store are refused with a remedy."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders)
    commit_generation(store, 0)
    store.close(remove=False)
    other = create([tmp_path / "c"])
    commit_generation(other, 0)
    other.close(remove=False)
    for wrong in (folders[::-1], folders[:1], [folders[0], tmp_path / "c"]):
        with pytest.raises(StorageCorruptError) as caught:
            recover_store(wrong)
        assert caught.value.remedy
    recover_store(folders).close(remove=True)


def test_nothing_to_recover(tmp_path: Path) -> None:
    """A missing job and a rank without files are refused with the path."""
    with pytest.raises(
        StorageError, match=r"no optimizer state in .*other/rank-00000.* another machine .* copy it here"
    ):
        recover_store([tmp_path], job="other")
    (tmp_path / "default" / "rank-00000").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"Reading .*manifest\.json.*No such file"):
        recover_store([tmp_path])
    assert not (tmp_path / "default" / "rank-00000" / "lock").exists()


def recorded(folder: Path, *, num_records: int, num_later: int = 0) -> Path:
    """Make a store with training records and further generations; return the rank's folder."""
    store = create([folder])
    for generation in range(num_records + num_later):
        commit_generation(store, generation)
        if generation < num_records:
            store.record_training(generation=generation, step=generation, content=b"what a loop needs", has_steps=True)
    store.close(remove=False)
    return folder / "default" / "rank-00000"


def test_a_training_record_that_fails_has_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has the number that the same record has on ranks where none has failed."""
    store = create([tmp_path])
    for generation in range(4):
        commit_generation(store, generation)
        with monkeypatch.context() as patch, suppress(StorageFullError):
            if generation in (1, 2):
                patch.setattr(training_record, "_write", fails)
            store.record_training(generation=generation, step=generation, content=b"", has_steps=True)
    store.close(remove=False)
    _, records = find_resumable([tmp_path], job="default", rank=0)
    assert [(record.number, record.step) for record in records] == [(4, 3)]


def fails(*_: Any, **__: Any) -> int:
    raise StorageFullError("A test has no space for the record.", "Let it go on.")


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def refusal(folder: Path) -> str:
    """Return why a training cannot be resumed."""
    with pytest.raises(StorageError) as caught:
        find_resumable([folder], job="default", rank=0)
    assert "Begin anew, without resuming from storage (leave ckpt_path out)" in caught.value.remedy
    return caught.value.problem


def test_training_records_of_no_use(tmp_path: Path) -> None:
    """The error says which record is damaged, where records have ended, or that later generations have come."""
    one, both, late, ended = (tmp_path / name for name in ("one", "both", "late", "ended"))
    damage(recorded(one, num_records=4, num_later=1) / "training-0.bin")
    assert re.search(r"record '.*training-0.bin' is damaged, and later steps .* \(step 2\)", refusal(one))
    for name in ("training-0.bin", "training-1.bin"):
        damage(recorded(both, num_records=4) / name if not both.exists() else both / "default/rank-00000" / name)
    assert re.search(r"records '.*0.bin' and '.*1.bin' are damaged\.", refusal(both))
    recorded(late, num_records=2, num_later=2)
    assert "after its last record (step 1): several optimizer steps" in refusal(late)
    store = create([ended])
    commit_generation(store, 0)
    store.record_training(generation=0, step=7, content=b"", has_steps=True)
    store.records.end("a callback holds a lock.")
    store.close(remove=False)
    assert refusal(ended).endswith("wrote no training records after step 7: a callback holds a lock.")
