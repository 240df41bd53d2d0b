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
    StorageCorruptError,
    StorageError,
    StorageFullError,
)
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.storage import ExtentMap
from lightning_smartinfinity.storage.state.opening import create_store, recover_store
from tests.storage.makers import commit_generation, create, created, description, tree

RANK_FILES = {"lock", "manifest.json", "state.bin"}


def test_folders_and_files(tmp_path: Path) -> None:
    """Each storage folder has one fully allocated state file, private to the user. The first has the commit record."""
    folders = [tmp_path / "a" / "deep", tmp_path / "b"]
    with created(folders, rank=3, job="mine") as store:
        first, second = (folder / "mine" / "rank-00003" for folder in folders)
        assert tree(first) == RANK_FILES | {"commit.bin"}
        assert tree(second) == RANK_FILES
        for device, folder in enumerate((first, second)):
            status = (folder / "state.bin").stat()
            assert status.st_size == store.extents.file_bytes(device)
            assert status.st_blocks * 512 >= status.st_size
            assert status.st_mode & 0o777 == 0o600
        assert store.generation == -1
    assert tree(tmp_path) == {"a", "a/deep", "b"}


def test_manifest_is_readable(tmp_path: Path) -> None:
    """Every folder has a JSON manifest that describes the store."""
    with created([tmp_path / "a", tmp_path / "b"], durability="power") as store:
        for device, name in enumerate("ab"):
            manifest = json.loads((tmp_path / name / "default" / "rank-00000" / "manifest.json").read_text())
            assert manifest["version"] == 4
            assert manifest["state_format"] == "fp32"
            assert manifest["device"] == device
            assert manifest["folders"] == [str(tmp_path / "a"), str(tmp_path / "b")]
            assert manifest["layout"]["numel"] == store.extents.numel
            assert manifest["durability"] == "power"
            assert [parameter["name"] for parameter in manifest["parameters"]] == ["p0", "p1"]
            assert manifest["groups"] == [{"lr": 0.1}]


def test_one_place_takes_half_the_space(tmp_path: Path) -> None:
    """With durability none a tasklet has one place instead of two."""
    sizes = []
    for durability in ("none", "step"):
        with created([tmp_path], durability=durability) as store:
            sizes.append(Path(store.files[0].path).stat().st_size)
    assert 2 * sizes[0] == sizes[1]


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
    recover_store([tmp_path]).close(remove=True)
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


def test_leftover_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    """A new store silently replaces a leftover that is unlocked and was not to be kept."""
    create([tmp_path]).close(remove=False)
    with created([tmp_path]) as store:
        assert store.generation == -1


def test_leftover_of_a_creation_that_was_killed(tmp_path: Path) -> None:
    """A leftover state file without a manifest is replaced too, because the lock says that this package made it."""
    folder = tmp_path / "default" / "rank-00000"
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


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    """A file anywhere in the path of a storage folder is refused with a remedy."""
    (tmp_path / "file").touch()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "default").touch()
    (tmp_path / "rank" / "default").mkdir(parents=True)
    (tmp_path / "rank" / "default" / "rank-00000").touch()
    before = tree(tmp_path)
    for storage in ("file", "file/below", "job", "rank"):
        with pytest.raises(StorageError, match="Creating the folder") as caught:
            create([tmp_path / "made", tmp_path / storage])
        assert "remove it, or choose another folder" in caught.value.remedy
        assert tree(tmp_path) == before


@pytest.mark.parametrize("storage", ["/proc/nowhere", "/sys/kernel/nowhere", "/dev/null/nowhere"])
def test_folder_that_cannot_be_made(storage: str) -> None:
    """A folder that not even root can create is refused with a remedy."""
    with pytest.raises(StorageError, match="Creating the folder") as caught:
        create([Path(storage)])
    assert "choose another folder" in caught.value.remedy


def test_file_that_cannot_be_made(tmp_path: Path) -> None:
    """A folder in place of the state file is refused and stays."""
    folder = tmp_path / "default" / "rank-00000" / "state.bin"
    folder.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"state\.bin' is a folder, and not a regular file") as caught:
        create([tmp_path])
    assert caught.value.remedy
    assert folder.is_dir()


def test_name_too_long(tmp_path: Path) -> None:
    """A job name too long for the file system is refused with a remedy."""
    with pytest.raises(StorageError, match="File name too long") as caught:
        create([tmp_path], job="j" * 300)
    assert "shorter" in caught.value.remedy


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


def test_file_size_limit(tmp_path: Path) -> None:
    """A file size limit of the process is named in the error, and nothing is left behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        with pytest.raises(StorageError, match="File too large") as caught:
            create([tmp_path])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit -f" in caught.value.remedy
    assert tree(tmp_path) == set()


def test_too_few_descriptors(tmp_path: Path) -> None:
    """A lack of file descriptors is reported with the limit to raise, and nothing is left behind."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(StorageError) as caught:
            create([tmp_path / "a", tmp_path / "b"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in caught.value.remedy
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


def test_folder_of_something_else(tmp_path: Path) -> None:
    """A manifest that is not ours is refused, not deleted as a leftover."""
    folder = tmp_path / "default" / "rank-00000"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"name": "somebody else\'s"}')
    with pytest.raises(StorageCorruptError, match="not a readable manifest"):
        create([tmp_path])
    assert (folder / "manifest.json").exists()


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
    store = recover_store([tmp_path])
    assert store.generation == 0
    commit_generation(store, 1)
    assert store.generation == 1
    store.close(remove=True)
