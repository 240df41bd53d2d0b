"""Storage that fails: what cannot be written stays, and what cannot be read raises, at every request."""

from __future__ import annotations

import errno
import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.activations.entries import Entry
from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageFullError
from tests.activations.chains import BLOCK, assert_nothing_is_left, assert_right, assert_step_is_right, expected, saved
from tests.activations.models import drop_memory, everything, opened

ENTRIES = 11  # of a chain
TIGHT = everything(host_bytes=2 * BLOCK, budget_bytes=3 * BLOCK)


@pytest.mark.parametrize(
    ("at", "number", "error"),
    [(at, *((errno.EIO, StorageError) if at % 2 else (errno.ENOSPC, StorageFullError))) for at in range(ENTRIES)],
)
def test_a_write_that_fails(tmp_path: Path, at: int, number: int, error: type[StorageError]) -> None:
    """Nothing is lost: the tensor stays, nothing more is offloaded, and the failure is told once."""
    with (
        opened(tmp_path, TIGHT, faults={"fail_write_at": at, "errno": number}) as activations,
        warnings.catch_warnings(record=True, action="always") as told,
    ):
        for _ in range(2):
            before, was_stopped = activations.traffic(), activations._store.writes.stopped
            assert_step_is_right(activations)
            assert not was_stopped or activations.traffic().saved_bytes == before.saved_bytes
        failure = activations.take_failure()
        if activations._store.writes.stopped:
            assert isinstance(failure, error) and "unnamed file" in str(failure) and failure.remedy
            assert f"({BLOCK} bytes): Activations: writing" in str(failure)
            assert len(told) == 1 and "stays in memory from now on" in str(told[0].message)
        else:  # the write was cancelled, as backward wanted its tensor
            assert failure is None
        assert activations.take_failure() is None
        assert activations._store.writes.stopped or at >= ENTRIES - 3


def test_a_place_that_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file system keeps the tensor where it is."""
    refuse = Mock(side_effect=StorageFullError("The disk is full.", "Free space."))
    with opened(tmp_path, TIGHT) as activations:
        monkeypatch.setattr(activations._store.files.tensors, "add", refuse)
        with pytest.warns(UserWarning, match="The disk is full"):
            assert_step_is_right(activations)
        assert isinstance(activations.take_failure(), StorageFullError)


READS = [
    (at, *(("flip_read_at", StorageCorruptError) if at % 2 else ("fail_read_at", StorageError)))
    for at in range(ENTRIES - 3)
]


@pytest.mark.parametrize(("at", "kind", "error"), READS)
def test_a_read_that_fails(tmp_path: Path, at: int, kind: str, error: type[StorageError]) -> None:
    """It raises in backward, with the entry, the path and a remedy. A retained graph can then be run again."""
    with opened(tmp_path, TIGHT, faults={kind: at}) as activations:
        x, loss = saved(activations)
        with pytest.raises(
            error, match=rf"Entry \d+ of what forward saved \({BLOCK} bytes\): .*unnamed file"
        ) as raised:
            loss.backward(retain_graph=True)
        assert raised.value.remedy and x.grad is None
        assert_right(x, loss)
        assert activations.take_failure() is None and not activations._store.writes.stopped


@pytest.mark.parametrize(("at", "kind", "error"), READS)
def test_a_read_failure_that_is_noted(tmp_path: Path, at: int, kind: str, error: type[StorageError]) -> None:
    """Where other ranks would wait, backward goes on with NaN, and the failure is kept each time. The entry is not."""
    with opened(tmp_path, TIGHT, faults={kind: at}, notes_failures=True) as activations:
        x, loss = saved(activations)
        for retains in (True, False):
            assert activations.take_failure() is None
            loss.backward(retain_graph=retains)
            assert x.grad.isnan().all() and isinstance(activations.take_failure(), error)
        assert_nothing_is_left(activations)
        assert_step_is_right(activations)


@pytest.mark.parametrize("number", [ENTRIES - 1, ENTRIES - 2], ids=["wanted", "ahead"])
def test_memory_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Only a tensor that backward wants raises, and is named. Memory for one ahead of it is asked for again."""
    with opened(tmp_path, everything(host_bytes=(ENTRIES + 1) * BLOCK)) as activations:
        x, loss = saved(activations)
        drop_memory(activations)
        take = activations._store.pool.take

        def refuse(entry: Entry) -> torch.Tensor:
            if entry.number == number:
                raise StorageError("The system has no memory.", "Free some.")
            return take(entry)

        with monkeypatch.context() as patch:
            patch.setattr(activations._store.pool, "take", refuse)
            with pytest.raises(StorageError, match=rf"Entry {number} of what forward saved.*The system has no memory"):
                loss.backward(retain_graph=True)
        x.grad = None
        assert_right(x, loss)


def test_integers_that_cannot_be_read(tmp_path: Path) -> None:
    """They are zeros, which are valid indices."""
    with opened(tmp_path, TIGHT, faults={"fail_read_at": 0}, notes_failures=True) as activations:
        x = torch.zeros(BLOCK, requires_grad=True)
        with activations.forward(x):
            loss = x[torch.arange(100, 100 + BLOCK // 8)].sum()
        drop_memory(activations)
        loss.backward()
        assert x.grad[0] == BLOCK // 8 and isinstance(activations.take_failure(), StorageError)


def test_a_flipped_bit_that_nobody_looks_for(tmp_path: Path) -> None:
    """With verify=False, reads are not compared with checksums."""
    settings = everything(host_bytes=2 * BLOCK, budget_bytes=3 * BLOCK, verify=False)
    with opened(tmp_path, settings, faults={"flip_read_at": 0}) as activations:
        x, loss = saved(activations)
        loss.backward()
        assert not torch.equal(x.grad, expected(x))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """The first forward raises, before anything is saved. Where the folder is mended, the next one works."""
    folder = tmp_path / "file"
    folder.write_text("")
    activations = OffloadedActivations([folder], settings=TIGHT)
    with pytest.raises(StorageError, match="A file stands where a folder should be"), activations.forward():
        pass
    folder.unlink()
    assert_step_is_right(activations)
    activations.close()


def test_a_folder_in_memory(tmp_path: Path) -> None:
    """A folder on tmpfs saves no memory. A warning says so, nothing else changes, and nothing is left there."""
    folder = Path("/dev/shm") / tmp_path.name
    try:
        activations = OffloadedActivations(folder, settings=TIGHT)
        with pytest.warns(UserWarning, match="it is a tmpfs, which lives in host memory"):
            assert_step_is_right(activations)
        assert [path for path in folder.rglob("*") if path.is_file()] == []
        activations.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
