"""A new store moves one that a training can resume from out of its way, and never more than one of each job."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.store.leftovers import leftover_bytes, resumable_step
from lightning_smartinfinity.store.space import SpaceRequest, measure_space, require_space
from tests.store.makers import commit_generation, create, extents


def leave(folders: Sequence[Path], *, step: int, rank: int = 0, world_size: int = 1, has_steps: bool = True) -> None:
    """Leave the store of a training that was interrupted after a step."""
    store = create(folders, rank=rank, world_size=world_size)
    commit_generation(store, 0)
    store.record_training(generation=0, step=step, content=b"", has_steps=has_steps)
    store.close(remove=False)


def begin(folders: Sequence[Path], *, rank: int = 0, world_size: int = 1) -> None:
    """Begin a training that comes to its end."""
    create(folders, rank=rank, world_size=world_size).close(remove=True)


def ranks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_again_and_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script that fails again and again leaves its last two stores, and the log says what was replaced."""
    for step in (100, 2, 3):
        leave([tmp_path], step=step)
    assert ranks(tmp_path) == ["default", "default.aside"]
    assert resumable_step(tmp_path / "default/rank-00000") == 3
    assert resumable_step(tmp_path / "default.aside/rank-00000") == 2
    first, second = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "after step 100. It was moved to the job 'default.aside'. The next one that is moved replaces it." in first
    assert "replaced the one there, which was interrupted after step 100. " in second


def test_a_training_without_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store that was interrupted before its first step is removed, and one that was set aside before stays."""
    leave([tmp_path], step=7)
    leave([tmp_path], step=0, has_steps=False)
    begin([tmp_path])
    assert ranks(tmp_path) == ["default.aside"] and resumable_step(tmp_path / "default.aside/rank-00000") == 7
    assert len(caplog.records) == 1


@pytest.mark.parametrize("num_folders", [1, 2])
def test_fewer_ranks_than_before(tmp_path: Path, num_folders: int) -> None:
    """The stores of ranks that there are no more move, too, so that all can be resumed together."""
    folders = [tmp_path / f"storage{number}" for number in range(num_folders)]
    for step, before in ((7, 3), (8, 2)):
        for rank in range(before):
            leave(folders, step=step, rank=rank, world_size=before)
        begin(folders)
        for folder in folders:
            assert ranks(folder) == ["default.aside"]
            assert ranks(folder / "default.aside") == [f"rank-{rank:05d}" for rank in range(before)]
        assert {resumable_step(folders[0] / f"default.aside/rank-{rank:05d}") for rank in range(before)} == {step}


def test_what_was_set_aside_and_is_kept(tmp_path: Path) -> None:
    """It is not replaced, and nothing is moved."""
    store = create([tmp_path], world_size=1, job="default.aside", keep=True)
    commit_generation(store, 0)
    store.close(remove=False)
    leave([tmp_path], step=7)
    with pytest.raises(StorageError, match=r"default\.aside/rank-00000' holds .* asked to keep it"):
        begin([tmp_path])
    assert ranks(tmp_path) == ["default", "default.aside"]
    assert resumable_step(tmp_path / "default/rank-00000") == 7


def test_fewer_folders_than_before(tmp_path: Path) -> None:
    """A training is not torn apart: the new one is refused, and the interrupted one can still be resumed."""
    folders = [tmp_path / "a", tmp_path / "b"]
    leave(folders, step=7)
    with pytest.raises(StorageError, match=r"step 7\. It lies in .*/a', .*/b', of which this one uses 1"):
        begin(folders[:1])
    assert [ranks(folder) for folder in folders] == [["default"], ["default"]]
    assert resumable_step(folders[0] / "default/rank-00000") == 7
    begin(folders)


def test_a_full_disk_names_the_interrupted_training(tmp_path: Path) -> None:
    """A new store cannot have the bytes of an interrupted training, and the error says how to free them."""
    leave([tmp_path], step=7)
    rank_folder = tmp_path / "default/rank-00000"
    deleted, set_aside = leftover_bytes(rank_folder)
    assert deleted == 0 and set_aside >= extents().file_bytes(0)
    (request,) = measure_space([tmp_path], job="default", rank=0, extents=extents(), num_parameters=2)
    assert request.resumable_bytes == set_aside
    small = SpaceRequest(**{**vars(request), "free_bytes": 0})
    with pytest.raises(StorageFullError) as caught:
        require_space([small])
    assert "there hold a training that was interrupted: resume it with ckpt_path='storage'" in caught.value.remedy
    leave([tmp_path], step=8)
    assert leftover_bytes(rank_folder)[0] >= extents().file_bytes(0)  # of the one that it replaces
