"""Jobs in a storage folder: what is listed, and what is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import StorageError, StorageLockedError
from lightning_smartinfinity.storage.jobs.jobs import Job, find_jobs, remove_job
from tests.storage.makers import created, left, tree


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
    assert job.written is not None and abs(job.written - time.time()) < 3600
    assert tree(tmp_path) == before


def test_a_job_in_use(tmp_path: Path) -> None:
    """Its process is named, and it is not removed."""
    with created([tmp_path]):
        job = only(tmp_path)
        assert job.in_use and job.pids == [os.getpid()] and job.generation == -1
        before = tree(tmp_path)
        with pytest.raises(StorageLockedError, match=f"process {os.getpid()}"):
            remove_job(job, kept=True)
        assert tree(tmp_path) == before


def test_a_dead_job_is_removed(tmp_path: Path) -> None:
    """State, what was archived and the folders go; other jobs stay."""
    of_ranks(tmp_path, 0, 0)
    of_ranks(tmp_path, 0, job="other")
    (tmp_path / "default/rank-00000/manifest.json.1.aside").write_text("damaged")
    assert remove_job(find_jobs(tmp_path)[0], kept=False) == []
    assert [job.name for job in find_jobs(tmp_path)] == ["other"]
    assert not (tmp_path / "default").exists()


def test_files_of_something_else_stay(tmp_path: Path) -> None:
    """A folder with other files is left, and is named. Of archived files only manifests and locks are ours."""
    of_ranks(tmp_path, 0)
    folder = tmp_path / "default/rank-00000"
    names = ["mine", "notes.aside", "manifest.json.x.aside", "manifest.json.1.aside.txt", "lockx1.aside"]
    for name in [*names, "manifest.json.2.aside", "lock.1.aside"]:
        (folder / name).touch()
    assert remove_job(only(tmp_path), kept=False) == [folder]
    assert sorted(os.listdir(folder)) == sorted(names)


def test_a_kept_job_is_removed_on_request(tmp_path: Path) -> None:
    """State that is to be kept goes only if that is asked for. What counts is whether it is kept when it is locked."""
    of_ranks(tmp_path, 0)
    listed = only(tmp_path)
    of_ranks(tmp_path, 0, keep=True)
    before = tree(tmp_path)
    for job in (listed, only(tmp_path)):
        with pytest.raises(StorageError, match="is to be kept") as caught:
            remove_job(job, kept=False)
        assert "--kept" in caught.value.remedy and tree(tmp_path) == before
    assert job.kept
    remove_job(job, kept=True)
    assert tree(tmp_path) == set()


def test_a_job_that_cannot_be_read(tmp_path: Path) -> None:
    """A damaged manifest, a link in place of a folder or of a file is told, and does not hide other jobs."""
    for name in ("damaged", "linked", "whole"):
        of_ranks(tmp_path, 0, job=name)
    (tmp_path / "damaged/rank-00000/manifest.json").write_text("{")
    (tmp_path / "linked/rank-00001").symlink_to(tmp_path / "whole/rank-00000")
    damaged, linked, whole = find_jobs(tmp_path)
    assert "not a readable manifest" in damaged.problems[0]
    assert "symbolic link" in linked.problems[0] and linked.folders[0].problem is None
    assert whole.problems == [] and whole.generation == 0


@pytest.mark.parametrize("content", [b"\0" * 40, b"\xff\xff\n"])
def test_a_job_with_a_damaged_lock(tmp_path: Path, content: bytes) -> None:
    """It is listed, and removed; what the lock's notes alone had told stays unknown."""
    of_ranks(tmp_path, 0)
    (tmp_path / "default/rank-00000/lock").write_bytes(content)
    job = only(tmp_path)
    assert job.damaged == (content[0] != 0)
    assert remove_job(job, kept=False) == []
    assert tree(tmp_path) == set()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """It is refused with its path, and an empty one has no jobs."""
    assert find_jobs(tmp_path) == []
    with pytest.raises(StorageError, match="nowhere"):
        find_jobs(tmp_path / "nowhere")
