"""Commit records: what is read of them, and what is said of one that cannot be read."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageCorruptError
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.spread import Placement
from lightning_smartinfinity.storage.state.commit_record import (
    CommitRecord,
    decode_record,
    encode_record,
    read_records,
    record_bytes,
    write_record,
)
from lightning_smartinfinity.storage.state.recovery import records_of
from lightning_smartinfinity.storage.state.scrub import scrub_rank
from tests.storage.makers import commit_generation, create, left, recovered

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


@given(records())
def test_record_survives_encoding(record: CommitRecord) -> None:
    """Every field survives encoding, and the record fits its place."""
    content = encode_record(record, job=JOB)
    assert len(content) <= record_bytes(len(record.tasklet_generations), len(record.steps))
    decoded = decode(content + bytes(100), record)
    assert decoded is not None
    assert decoded.generation == record.generation
    for name in ("tasklet_generations", "steps"):
        assert np.array_equal(getattr(decoded, name), getattr(record, name))
    for found, column in zip(decoded.placement, record.placement, strict=True):
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


def test_records_alternate(tmp_path: Path) -> None:
    """A record never overwrites its predecessor. Both are found, the newest first."""
    path, folder = tmp_path / "commit.bin", OpenFolder(tmp_path)
    path.write_bytes(bytes(2 * record_bytes(9, 2)))
    shape = {
        "placement": Placement(np.zeros(9, np.uint16), np.zeros(9, np.uint32)),
        "tasklet_generations": np.zeros(9, np.int64),
        "steps": np.zeros(2, np.int64),
    }
    for generation in range(5):
        write_record(folder, CommitRecord(generation=generation, **shape), job=JOB, flush=False)
        found = read_records(folder, num_tasklets=9, num_parameters=2, job=JOB)
        assert [record.generation for record in found.intact] == [generation, generation - 1][: generation + 1]
        assert found.problem is None
    assert path.stat().st_size <= 2 * record_bytes(9, 2)


RECORD = range(56 + 5 * 14 + 2 * 8 + 4)


def three_generations(folder: Path) -> Path:
    """Return the commit records of a closed store; that of generation 2 lies first."""
    return left(folder, generations=3, world_size=1) / "commit.bin"


def recovered_silently(folder: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return recovered(folder)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


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
    assert path.read_bytes()[4096:] == whole[4096:]
    assert recovered_silently(tmp_path) == 1


def test_the_older_record_cannot_be_read(tmp_path: Path) -> None:
    """It could have been the newer one, so that the warning is the same; the newest generation is taken."""
    path = three_generations(tmp_path)
    path.write_bytes(flipped(path.read_bytes(), 4096 + 60))
    with pytest.warns(UserWarning, match=r"torn by a power loss or damaged since\. Going on from generation 2\."):
        assert recovered(tmp_path) == 2


def test_no_record_can_be_read(tmp_path: Path) -> None:
    """The error says what may have happened, as the warning does."""
    path = three_generations(tmp_path)
    path.write_bytes(flipped(flipped(path.read_bytes(), 60), 4096 + 60))
    with pytest.raises(StorageCorruptError, match="torn by a power loss or damaged since"):
        recover_store([tmp_path])


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_record_that_was_erased(last: int, tmp_path: Path) -> None:
    """A commit that was rolled back, or that never came, leaves nothing to warn of or to report."""
    store = create([tmp_path], world_size=1)
    for generation in range(last + 2):
        commit_generation(store, generation)
        if generation <= last:
            assert records_of(OpenFolder(tmp_path / "default/rank-00000"), store.manifest).problem is None
    store.revert()
    store.close(remove=False)
    assert scrub_rank([tmp_path / "default/rank-00000"], rank=0, show=hidden).unknown == ()
    assert recovered_silently(tmp_path) == last
