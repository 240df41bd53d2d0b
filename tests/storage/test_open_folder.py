"""What others put into a storage folder, where this package keeps its files, is neither used nor followed."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders import open_folder
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder, Trust
from tests.helpers import power_loss
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.storage.makers import commit_generation, create, created, manifest_with, tree

PRECIOUS = b"precious\n" * 100
IN_PLACE = "link or pipe in place of a file or folder of ours"
REFUSED = "StorageError, and nothing behind it changes"
OPEN_TO_OTHERS = "folder of another user, or open to others, in place of ours"
NAMED = "StorageError with the folder's name"
NAMES = ["lock", "manifest.json", "manifest.json.new", "state.bin", "commit.bin"]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def rank_folder(storage: Path, mode: int = 0o700) -> Path:
    folder = storage / "default" / "rank-00000"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    return folder


def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o022, 0o277])
def test_folders_and_files_are_private(tmp_path: Path, mask: int) -> None:
    """Folders have mode 0700 and files 0600, whatever the umask. The user's own storage folder is left alone."""
    storage = tmp_path / "storage"
    storage.mkdir()
    storage.chmod(0o777)
    with umask(mask), created([storage], keep=True) as store:
        commit_generation(store, 0)
        store.record_training(generation=0, step=0, content=b"", has_steps=True)
        store.keep()
        below = list((storage / "default").rglob("*"))
        assert {mode(path) for path in below if path.is_file()} == {0o600}
        assert {mode(path) for path in (storage / "default", *below) if path.is_dir()} == {0o700}
        files_of_state = {"lock", "manifest.json", "state.bin", "commit.bin", "training-0.bin", "training-1.bin"}
        assert len(below) == 1 + len(files_of_state)
        assert mode(storage) == 0o777


@pytest.mark.parametrize("name", NAMES)
def test_links_are_not_followed(tmp_path: Path, name: str, attack: Attack) -> None:
    """A link in place of any file is refused, and neither it nor its target changes."""
    target, folder = precious(tmp_path), rank_folder(tmp_path / "s")
    (folder / name).symlink_to(target)
    with pytest.raises(StorageError, match=f"{name}' is a symbolic link, and not a regular file") as caught:
        create([tmp_path / "s"])
    assert "Remove it" in caught.value.remedy
    assert target.read_bytes() == PRECIOUS and (folder / name).is_symlink()
    attack(IN_PLACE, tries=1, outcome=REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_pipes_do_not_hang(tmp_path: Path, name: str, attack: Attack) -> None:
    """A pipe in place of any file is refused at once."""
    os.mkfifo(rank_folder(tmp_path) / name)
    with pytest.raises(StorageError, match=f"{name}' is a pipe, and not a regular file"):
        create([tmp_path])
    attack(IN_PLACE, tries=1, outcome=REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_folders_in_place_of_files(tmp_path: Path, name: str) -> None:
    """A folder in place of any file is refused and stays."""
    (rank_folder(tmp_path) / name).mkdir()
    with pytest.raises(StorageError, match=f"{name}' is a folder, and not a regular file"):
        create([tmp_path])
    assert (tmp_path / "default/rank-00000" / name).is_dir()


def test_a_device_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is refused before it is opened, which can already change it."""
    folder, opened, real = OpenFolder(Path("/dev"), trust=Trust.ANY), [], os.open

    def watched(path: str, *arguments: int, **folders: int) -> int:
        opened.append(path)
        return real(path, *arguments, **folders)

    monkeypatch.setattr(os, "open", watched)
    with pytest.raises(StorageError, match=r"/dev/null' is a device"):
        folder.open("null", os.O_RDWR)
    assert opened == []


@pytest.mark.parametrize("name", NAMES)
def test_files_with_other_names_are_not_written(tmp_path: Path, name: str) -> None:
    """A hard link to a file elsewhere is refused, and the file keeps its content."""
    target, folder = precious(tmp_path), rank_folder(tmp_path / "s")
    os.link(target, folder / name)
    with pytest.raises(StorageError, match="2 hard links"):
        create([tmp_path / "s"])
    assert target.read_bytes() == PRECIOUS and (folder / name).exists()


@pytest.mark.parametrize("name", NAMES)
def test_files_of_something_else_stay(tmp_path: Path, name: str) -> None:
    """A file that neither a manifest nor the lock names is refused, and is not deleted as a leftover."""
    path = rank_folder(tmp_path) / name
    path.write_bytes(PRECIOUS)
    with pytest.raises(StorageError) as caught:
        create([tmp_path])
    assert str(path) in caught.value.problem and "Remove" in caught.value.remedy
    assert path.read_bytes() == PRECIOUS


def exchanged_after_a_look(monkeypatch: pytest.MonkeyPatch, path: Path, put: Callable[[], object]) -> None:
    """Let something else take the place of a file directly after it was looked at, before it is opened."""
    real = os.stat

    def look(name: Any, **kwargs: Any) -> os.stat_result:
        try:
            return real(name, **kwargs)
        finally:
            if name == path.name:
                path.unlink(missing_ok=True)
                put()

    monkeypatch.setattr(open_folder.os, "stat", look)


@pytest.mark.parametrize("way", ["read", "create"])
def test_a_link_that_comes_after_the_look(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    """A file that is exchanged for a link between the look and the opening is not read or written through it."""
    target, folder = precious(tmp_path), OpenFolder(rank_folder(tmp_path / "s"))
    path = folder.path / "state.bin"
    if way == "read":
        path.touch(mode=0o600)
    exchanged_after_a_look(monkeypatch, path, lambda: path.symlink_to(target))
    with pytest.raises(OSError, match=r"state\.bin"):
        getattr(folder, way)("state.bin")
    assert target.read_bytes() == PRECIOUS
    attack(IN_PLACE, tries=1, outcome=REFUSED)


def test_a_file_that_comes_after_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that somebody makes between the look and the making is not taken for a new one."""
    folder = OpenFolder(rank_folder(tmp_path))
    path = folder.path / "state.bin"
    exchanged_after_a_look(monkeypatch, path, lambda: path.write_bytes(PRECIOUS))
    with pytest.raises(FileExistsError):
        folder.create("state.bin")
    assert path.read_bytes() == PRECIOUS


@pytest.mark.parametrize("level", ["default", "default/rank-00000"])
def test_folders_behind_links_are_not_used(tmp_path: Path, level: str, attack: Attack) -> None:
    """A link in place of the job's or the rank's folder is refused, and state behind it stays."""
    elsewhere = create([tmp_path / "elsewhere"])
    elsewhere.close(remove=False)
    before = tree(tmp_path / "elsewhere")
    (tmp_path / "s" / level).parent.mkdir(parents=True)
    (tmp_path / "s" / level).symlink_to(tmp_path / "elsewhere" / level)
    for attempt in (create, recover_store):
        with pytest.raises(StorageError, match="is a symbolic link, which is not followed"):
            attempt([tmp_path / "s"])
    assert tree(tmp_path / "elsewhere") == before
    attack(IN_PLACE, tries=1, outcome=REFUSED)


def test_the_storage_folder_may_be_a_link(tmp_path: Path) -> None:
    """The user's own storage folder may be reached by a link, and may have any mode."""
    (tmp_path / "real").mkdir(mode=0o777)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with created([tmp_path / "link"]):
        assert tree(tmp_path / "real") > {"default"}


@pytest.mark.parametrize("level", ["default", "default/rank-00000"])
@pytest.mark.parametrize("open_mode", [0o777, 0o770])
def test_folders_that_others_may_write_to(tmp_path: Path, level: str, open_mode: int, attack: Attack) -> None:
    """A folder that was made beforehand, and that others can write to, is refused."""
    rank_folder(tmp_path)
    (tmp_path / level).chmod(open_mode)
    with pytest.raises(StorageError, match=rf"Other users may write to .*{level}' \(mode 0{open_mode:o}\)") as caught:
        create([tmp_path])
    assert "chmod -R go-w" in caught.value.remedy
    (tmp_path / level).chmod(0o700)
    create([tmp_path]).close(remove=True)
    attack(OPEN_TO_OTHERS, tries=1, outcome=NAMED)


@pytest.mark.parametrize("level", ["default", "default/rank-00000"])
def test_folders_of_other_users(tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch, attack: Attack) -> None:
    """A folder that belongs to another user is refused, also if this process is root's."""
    folder = rank_folder(tmp_path)
    if os.geteuid() == 0:
        os.chown(tmp_path / level, 12345, -1)
    else:
        monkeypatch.setattr(open_folder.os, "geteuid", lambda: 12345)
    with pytest.raises(StorageError, match=r"belongs to user .*, and not to"):
        create([tmp_path])
    assert folder.is_dir()
    attack(OPEN_TO_OTHERS, tries=1, outcome=NAMED)


def test_files_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that belongs to another user is refused."""
    create([tmp_path]).close(remove=False)
    folder = OpenFolder(tmp_path / "default/rank-00000")
    folder._owner = 12345  # only root could give a file away
    for attempt in (lambda: folder.read("manifest.json"), lambda: folder.open("state.bin", os.O_RDWR)):
        with pytest.raises(StorageError, match="and not to 12345"):
            attempt()


def test_the_folder_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    """A store goes on in its folder even if another takes its name, and leaves that one alone."""
    store = create([tmp_path])
    commit_generation(store, 0)
    (tmp_path / "default").rename(tmp_path / "moved")
    other = rank_folder(tmp_path)
    (other / "commit.bin").write_bytes(PRECIOUS)
    commit_generation(store, 1)
    store.close(remove=True)
    assert (other / "commit.bin").read_bytes() == PRECIOUS
    assert tree(tmp_path / "moved") == {"rank-00000"}


def leftover(tmp_path: Path, **config: object) -> Path:
    """Return the rank's folder of a killed process, with a damaged manifest."""
    store = create([tmp_path], **config)
    commit_generation(store, 0)
    store.close(remove=False)
    folder = tmp_path / "default" / "rank-00000"
    (folder / "manifest.json").write_text("{ damaged")
    return folder


def without_checksum(values: dict[str, Any]) -> bytes:
    return json.dumps({key: value for key, value in values.items() if key != "crc32"}).encode()


@pytest.mark.parametrize(
    ("changes", "encoded", "said"),
    [
        ({"version": 5}, manifest_with, "written by a newer version"),
        ({"version": 5}, without_checksum, "written by a newer version"),
        ({"state_format": "int4"}, manifest_with, "in the format 'int4'"),
    ],
)
def test_a_leftover_of_a_newer_version(
    changes: dict[str, Any], encoded: Callable[[Any], bytes], said: str, tmp_path: Path
) -> None:
    """It is not damaged: the next run refuses it by name and deletes nothing, and a scrub says that it cannot tell."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    path = tmp_path / "default" / "rank-00000" / "manifest.json"
    path.write_bytes(encoded(json.loads(path.read_text()) | changes))
    before = power_loss.content(tmp_path)
    with pytest.raises(StorageError, match=said):
        create([tmp_path])
    assert power_loss.content(tmp_path) == before
    assert main(["scrub", str(tmp_path), "--quiet"]) == 2


def test_a_damaged_leftover_is_archived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The manifest of a job that nobody kept does not hinder the next one: it is renamed, and one log line says so."""
    for number in (1, 2):
        folder = leftover(tmp_path)
        with caplog.at_level(logging.WARNING), created([tmp_path]) as store:
            assert store.generation == -1
        assert (folder / f"manifest.json.{number}.aside").read_text() == "{ damaged"
        (message,) = [record.getMessage() for record in caplog.records]
        assert str(folder / "manifest.json") in message and f"manifest.json.{number}.aside" in message
        caplog.clear()
    assert {path.name for path in folder.iterdir()} == {"manifest.json.1.aside", "manifest.json.2.aside"}


@pytest.mark.parametrize("keep", [lambda: {"keep": True}, dict], ids=["by its setting", "later"])
def test_a_damaged_store_that_was_kept_stays(tmp_path: Path, keep: Callable[[], dict[str, bool]]) -> None:
    """State that somebody asked to keep is refused as it is, even if its manifest is damaged."""
    store = create([tmp_path], **keep())
    commit_generation(store, 0)
    store.keep()
    store.close(remove=False)
    folder = tmp_path / "default" / "rank-00000"
    (folder / "manifest.json").write_text("{ damaged")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StorageCorruptError, match="not a readable manifest"):
        create([tmp_path])
    del before[folder / "lock"]
    assert {path: path.read_bytes() for path in folder.iterdir() if path.name != "lock"} == before


# Every seventh is each bit of some byte, and a bit of each byte.
@pytest.mark.parametrize(
    ("name", "every"),
    long_but([("lock", 7), ("manifest.json", 31)], [("lock", 7), ("manifest.json", 31), ("manifest.json", 7)]),
)
def test_no_bit_makes_a_kept_store_one_to_be_removed(tmp_path: Path, name: str, every: int) -> None:
    """Lock and manifest both say that a store is kept, so whichever bit of one flips, the next job removes nothing."""
    store = create([tmp_path], keep=True)
    commit_generation(store, 0)
    store.close(remove=False)
    folder = tmp_path / "default" / "rank-00000"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for number in range(0, 8 * len(before[name]), every):
        changed = bytearray(before[name])
        changed[number // 8] ^= 1 << number % 8
        (folder / name).write_bytes(changed)
        with pytest.raises(StorageError):
            create([tmp_path])
        for file, content in before.items():
            if file not in ("lock", name):
                assert (folder / file).read_bytes() == content
        (folder / "lock").write_bytes(before["lock"])


def test_a_manifest_that_was_being_written(tmp_path: Path) -> None:
    """A temporary file of a killed process is replaced, because the lock names it."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    temporary = tmp_path / "default/rank-00000/manifest.json.new"
    temporary.write_text("half")
    store = recover_store([tmp_path])
    store.keep()
    assert not temporary.exists()
    store.close(remove=True)
    assert tree(tmp_path) == set()


def test_a_recovered_store_without_its_lock(tmp_path: Path) -> None:
    """The files that the manifest names are deleted with the store, also if the lock file was lost."""
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    (tmp_path / "default/rank-00000/lock").unlink()
    (tmp_path / "default/rank-00000/thesis.bin").write_bytes(PRECIOUS)
    recover_store([tmp_path]).close(remove=True)
    assert tree(tmp_path / "default/rank-00000") == {"thesis.bin"}
