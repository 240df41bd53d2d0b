"""Creating and removing a store: the files it makes, the files it leaves behind, and the obstacles it reports."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import (
    ConfigError,
    StorageError,
    StorageFullError,
)
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.storage import ExtentMap
from lightning_smartinfinity.storage.state.opening import create_store
from tests.storage.makers import commit_generation, create, created, description, left, recovered, tree

RANK_FILES = {"lock", "manifest.json", "state.bin"}


def test_folders_and_files(tmp_path: Path) -> None:
    """Each storage folder has one fully allocated state file, private to the user. The first has the commit record.

    Every folder has a JSON manifest that describes the store.
    """
    folders = [tmp_path / "a" / "deep", tmp_path / "b"]
    with created(folders, rank=3, job="mine", durability="power") as store:
        first, second = (folder / "mine" / "rank-00003" for folder in folders)
        assert tree(first) == RANK_FILES | {"commit.bin"}
        assert tree(second) == RANK_FILES
        for device, folder in enumerate((first, second)):
            status = (folder / "state.bin").stat()
            assert status.st_size == store.extents.file_bytes(device)
            assert status.st_blocks * 512 >= status.st_size
            assert status.st_mode & 0o777 == 0o600
            manifest = json.loads((folder / "manifest.json").read_text())
            assert manifest["layout"].pop("numel") == store.extents.numel
            assert [parameter["name"] for parameter in manifest["parameters"]] == ["p0", "p1"]
            assert manifest == manifest | {
                "version": 4,
                "state_format": "fp32",
                "device": device,
                "folders": list(map(str, folders)),
                "durability": "power",
                "groups": [{"lr": 0.1}],
            }
        assert store.generation == -1
    assert tree(tmp_path) == {"a", "a/deep", "b"}


def test_strangers_files_are_left_alone(tmp_path: Path) -> None:
    """Removing a store removes its own files only, and keeps a folder that holds anything else."""
    store = create([tmp_path])
    mine = tmp_path / "default" / "notes.txt"
    mine.write_text("mine")
    store.close(remove=True)
    assert tree(tmp_path) == {"default", "default/notes.txt"}


def test_close_keeps_or_removes(tmp_path: Path) -> None:
    """Closing is idempotent, and a store closed without removal can be recovered."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    store.close(remove=True)  # already closed: nothing is removed
    assert recovered(tmp_path) == 0
    assert tree(tmp_path) == set()


def test_close_when_storage_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be removed stays without an error, and every folder is unlocked."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as gone:
        gone.setattr(os, "unlink", fail)
        store.close(remove=True)
    assert {"a/default/rank-00000/lock", "b/default/rank-00000/state.bin"} < tree(tmp_path)
    create(folders).close(remove=True)
    assert tree(tmp_path) == {"a", "b"}


def test_leftovers_are_replaced(tmp_path: Path) -> None:
    """A new store silently replaces a leftover that is unlocked and was not to be kept.

    A state file without a manifest is replaced, too, because the lock says that this package made it.
    """
    folder = left(tmp_path)
    with created([tmp_path]) as store:
        assert store.generation == -1
    folder.mkdir(parents=True)
    (folder / "state.bin").write_bytes(b"half")
    (folder / "lock").write_text("1234\nstate.bin\n")
    with created([tmp_path]):
        pass
    assert tree(tmp_path) == set()


def test_same_folder_twice(tmp_path: Path) -> None:
    """One folder under two names is a setting error, not a lock conflict."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"link' twice"):
        create([tmp_path, tmp_path / "link"])
    assert tree(tmp_path) == {"link"}


@pytest.mark.parametrize(
    ("storage", "job", "problem", "remedy"),
    [
        *(
            (storage, "default", "Creating the folder", "remove it, or choose another folder")
            for storage in ("file", "file/below", "job", "rank")
        ),
        *(
            (storage, "default", "Creating the folder", "choose another folder")
            for storage in ("/proc/nowhere", "/sys/kernel/nowhere", "/dev/null/nowhere")
        ),
        ("new", "j" * 300, "File name too long", "shorter"),
    ],
)
def test_folder_that_cannot_be_made(tmp_path: Path, storage: str, job: str, problem: str, remedy: str) -> None:
    """A file anywhere in the path of a folder, one that not even root can make, and a long name are refused."""
    (tmp_path / "file").touch()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "default").touch()
    (tmp_path / "rank" / "default").mkdir(parents=True)
    (tmp_path / "rank" / "default" / "rank-00000").touch()
    before = tree(tmp_path)
    with pytest.raises(StorageError, match=problem) as caught:
        create([tmp_path / "made", tmp_path / storage], job=job)
    assert remedy in caught.value.remedy
    assert tree(tmp_path) == before


def test_too_little_space(tmp_path: Path) -> None:
    """A store too large for the file system is refused before anything is allocated."""
    huge = ExtentMap(numel=1 << 50, tasklet_numel=1 << 45, num_arrays=3, num_devices=1, places_per_tasklet=2)
    with pytest.raises(StorageFullError, match=r"needs .* GiB in '.*where .* GiB are free"):
        create_store([tmp_path / "new"], config=TransferConfig(), extents=huge, description=description())
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_allocation_that_fails_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """If allocation fails in the second folder, the first folder's files are removed as well."""
    real, calls = os.posix_fallocate, []

    def fail_second(descriptor: int, offset: int, length: int) -> None:
        calls.append(length)
        real(descriptor, offset, length // len(calls))
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail_second)
    kind = StorageFullError if number == errno.ENOSPC else StorageError
    with pytest.raises(kind, match=r"Allocating \d+ bytes for .*b/default/rank-00000/state\.bin") as caught:
        create([tmp_path / "a", tmp_path / "b"])
    assert type(caught.value) is kind
    assert tree(tmp_path) == set()


@pytest.mark.parametrize(
    ("limit", "value", "remedy"),
    [(resource.RLIMIT_FSIZE, 64 * 1024, "ulimit -f"), (resource.RLIMIT_NOFILE, None, "ulimit -n")],
    ids=["file size", "descriptors"],
)
def test_limits_of_the_process(tmp_path: Path, limit: int, value: int | None, remedy: str) -> None:
    """A file size limit and a lack of descriptors are named in the error, and nothing is left behind."""
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (free + 1 if value is None else value, hard))
    try:
        with pytest.raises(StorageError) as caught:
            create([tmp_path / "a", tmp_path / "b"])
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert remedy in caught.value.remedy
    assert tree(tmp_path) == set()


def test_manifest_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at the last file removes everything, the temporary file included."""

    def refuse(source: str, target: str, **folders: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match=r"manifest\.json.*Read-only file system") as caught:
        create([tmp_path / "new"])
    assert "remount" in caught.value.remedy
    assert tree(tmp_path) == set()


def test_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps working when the process changes its working directory."""
    monkeypatch.chdir(tmp_path)
    with created([Path("relative")]) as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        commit_generation(store, 0)
        assert store.generation == 0
    assert tree(tmp_path) == {"relative", "elsewhere"}


def test_interrupted_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the commit leaves the previous generation, in memory and on storage."""
    real = os.pwrite

    def interrupt_once(descriptor: int, content: bytes, offset: int) -> int:
        monkeypatch.setattr(os, "pwrite", real)
        real(descriptor, content, offset)
        raise KeyboardInterrupt

    store = create([tmp_path])
    commit_generation(store, 0)
    monkeypatch.setattr(os, "pwrite", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        commit_generation(store, 1)
    assert store.generation == 0
    store.close(remove=False)
    assert recovered(tmp_path) == 0
