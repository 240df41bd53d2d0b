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
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders import open_folder
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder, Trust
from tests.helpers import power_loss
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.storage.makers import commit_generation, create, created, left, manifest_with, recovered, tree

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
@pytest.mark.parametrize(
    ("put", "problem"),
    [
        pytest.param(
            lambda path, target: path.symlink_to(target), "is a symbolic link, and not a regular file", id="link"
        ),
        pytest.param(lambda path, _: os.mkfifo(path), "is a pipe, and not a regular file", id="pipe"),
        pytest.param(lambda path, _: path.mkdir(), "is a folder, and not a regular file", id="folder"),
        pytest.param(lambda path, target: os.link(target, path), "2 hard links", id="other name of a file"),
        pytest.param(lambda path, _: path.write_bytes(PRECIOUS), "rank-00000", id="file of something else"),
    ],
)
def test_what_is_in_place_of_a_file(
    tmp_path: Path, name: str, put: Callable[[Path, Path], object], problem: str, attack: Attack
) -> None:
    """It is refused at once and stays, and neither it nor its target changes.

    A file that neither a manifest nor the lock names is not deleted as a leftover.
    """
    target, path = precious(tmp_path), rank_folder(tmp_path / "s") / name
    put(path, target)
    before = os.lstat(path).st_ino
    with pytest.raises(StorageError, match=problem) as caught:
        create([tmp_path / "s"])
    assert str(path) in caught.value.problem
    assert ("a file of its own" if "links" in problem else "Remove") in caught.value.remedy
    assert target.read_bytes() == PRECIOUS and os.lstat(path).st_ino == before
    assert not path.is_file() or path.read_bytes() == PRECIOUS
    if "regular" in problem and not path.is_dir():
        attack(IN_PLACE, tries=1, outcome=REFUSED)


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


@pytest.mark.parametrize(
    ("way", "is_link"), [("read", True), ("create", True), ("create", False)], ids=["read", "create", "a file"]
)
def test_what_comes_after_the_look(
    tmp_path: Path, way: str, is_link: bool, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    """What takes a file's place between the look and the opening is not read, written or taken for a new file."""
    target, folder = precious(tmp_path), OpenFolder(rank_folder(tmp_path / "s"))
    path = folder.path / "state.bin"
    if way == "read":
        path.touch(mode=0o600)
    put = path.symlink_to if is_link else target.rename
    exchanged_after_a_look(monkeypatch, path, lambda: put(target if is_link else path))
    with pytest.raises(OSError, match=r"state\.bin"):
        getattr(folder, way)("state.bin")
    assert path.read_bytes() == PRECIOUS
    if is_link:
        attack(IN_PLACE, tries=1, outcome=REFUSED)


@pytest.mark.parametrize("level", ["default", "default/rank-00000"])
def test_folders_behind_links_are_not_used(tmp_path: Path, level: str, attack: Attack) -> None:
    """A link in place of the job's or the rank's folder is refused, and state behind it stays."""
    left(tmp_path / "elsewhere")
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
@pytest.mark.parametrize("open_mode", [0o777, 0o770, None], ids=["all may write", "a group may", "another's"])
def test_folders_of_others(
    tmp_path: Path, level: str, open_mode: int | None, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    """A folder that others can write to, or that belongs to another user, is refused, also by root."""
    folder = rank_folder(tmp_path)
    problem = "belongs to user .*, and not to"
    if open_mode is not None:
        (tmp_path / level).chmod(open_mode)
        problem = rf"Other users may write to .*{level}' \(mode 0{open_mode:o}\)"
    elif os.geteuid() == 0:
        os.chown(tmp_path / level, 12345, -1)
    else:
        monkeypatch.setattr(open_folder.os, "geteuid", lambda: 12345)
    with pytest.raises(StorageError, match=problem) as caught:
        create([tmp_path])
    assert folder.is_dir() and (open_mode is None or "chmod -R go-w" in caught.value.remedy)
    attack(OPEN_TO_OTHERS, tries=1, outcome=NAMED)


def test_files_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that belongs to another user is refused."""
    folder = OpenFolder(left(tmp_path))
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
    path = left(tmp_path) / "manifest.json"
    path.write_bytes(encoded(json.loads(path.read_text()) | changes))
    before = power_loss.content(tmp_path)
    with pytest.raises(StorageError, match=said):
        create([tmp_path])
    assert power_loss.content(tmp_path) == before
    assert main(["scrub", str(tmp_path), "--quiet"]) == 2


def test_a_damaged_leftover_is_archived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The manifest of a job that nobody kept does not hinder the next one: it is renamed, and one log line says so."""
    for number in (1, 2):
        folder = left(tmp_path)
        (folder / "manifest.json").write_text("{ damaged")
        with caplog.at_level(logging.WARNING), created([tmp_path]) as store:
            assert store.generation == -1
        assert (folder / f"manifest.json.{number}.aside").read_text() == "{ damaged"
        (message,) = [record.getMessage() for record in caplog.records]
        assert str(folder / "manifest.json") in message and f"manifest.json.{number}.aside" in message
        caplog.clear()
    assert {path.name for path in folder.iterdir()} == {"manifest.json.1.aside", "manifest.json.2.aside"}


# Every seventh is each bit of some byte, and a bit of each byte.
@pytest.mark.parametrize(
    ("name", "every"),
    long_but([("lock", 7), ("manifest.json", 31)], [("lock", 7), ("manifest.json", 31), ("manifest.json", 7)]),
)
def test_no_bit_makes_a_kept_store_one_to_be_removed(tmp_path: Path, name: str, every: int) -> None:
    """Lock and manifest both say that a store is kept, so whichever bit of one flips, the next job removes nothing."""
    store = create([tmp_path], keep=name == "lock")
    commit_generation(store, 0)
    store.keep()  # which may come later than the store, too
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
    temporary = left(tmp_path) / "manifest.json.new"
    temporary.write_text("half")
    store = recover_store([tmp_path])
    store.keep()
    assert not temporary.exists()
    store.close(remove=True)
    assert tree(tmp_path) == set()


def test_a_recovered_store_without_its_lock(tmp_path: Path) -> None:
    """The files that the manifest names are deleted with the store, also if the lock file was lost."""
    folder = left(tmp_path)
    (folder / "lock").unlink()
    (folder / "thesis.bin").write_bytes(PRECIOUS)
    assert recovered(tmp_path) == 0
    assert tree(folder) == {"thesis.bin"}
