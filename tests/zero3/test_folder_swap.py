"""A save that is killed at any moment leaves the whole old folder or the whole new one."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from lightning_smartinfinity.errors import CheckpointError, StorageError, StorageLockedError, StorageTimeoutError
from lightning_smartinfinity.storage.folders import replacement
from lightning_smartinfinity.storage.folders.replacement import beside, flush, flush_tree
from lightning_smartinfinity.storage.folders.staging_folder import is_in_use, locked, mark_of, remove_content, rooms_in
from lightning_smartinfinity.storage.io import deadlines as in_time
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.folders.divided_save import PartsHere, common_save, id_of
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import remove_interrupted, replacing
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import FILES_BESIDE, restore_interrupted
from lightning_smartinfinity.zero3.ranks import file_systems
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.power_loss import RecordedDisk, observed
from tests.helpers.waiting import LIMIT, await_that
from tests.storage.makers import killed_before

TAG = "checkpoint"
FILES = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
SYSTEM_CALLS = ("mkdir", "open", "link", "rename", "replace", "fsync", "unlink", "rmdir")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as one rank; agreement between ranks is tested elsewhere with real ranks."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    for module in (folder_swap, file_systems):
        monkeypatch.setattr(module, "raising_together", lambda group=None: nullcontext())
        monkeypatch.setattr(module, "gather", lambda value, group: [value])


@pytest.fixture(params=["exchange", "two renames"])
def _file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that exchanges folders by one call, and one that has neither such a call nor hard links."""
    if request.param == "two renames":
        monkeypatch.setattr(replacement, "exchange", lambda first, second: False)
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))


@contextmanager
def saving(path: Path, content: str, tag: str = TAG) -> Iterator[Path]:
    """Save as DeepSpeed does: a subfolder with files, and files beside it; yield the new folder before the end."""
    with replacing(path, tag) as (staging, *_):
        (staging / tag).mkdir(exist_ok=True)
        for name in FILES:
            (staging / tag / name).write_text(content)
        (staging / "latest").write_text(tag)
        yield staging


def save(path: Path, content: str, tag: str = TAG) -> None:
    with saving(path, content, tag):
        pass


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a checkpoint that is not there yet."""
    return tmp_path / "a.ckpt"


@pytest.fixture
def old(path: Path) -> Path:
    """Return the path of a checkpoint that was saved."""
    save(path, "old")
    return path


def saved(path: Path) -> set[str]:
    """Return the contents of the files under the tag."""
    restore_interrupted(path, TAG)
    return {(path / TAG / name).read_text() for name in FILES}


@pytest.mark.usefixtures("_file_system")
def test_a_save_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    """A save removes all files of the old one, even those without a counterpart, and keeps the user's own files."""
    path = tmp_path / "deep" / "a.ckpt"
    save(path, "old")
    (path / TAG / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_text("old")
    own = [path / "notes.txt", path / TAG / "loss_states.pt", path / TAG / "plots" / "loss_states.pt"]
    own[-1].parent.mkdir()
    (path / TAG / "link").symlink_to("elsewhere")
    for file in own:
        file.write_text("mine")
    save(path, "new")
    assert saved(path) == {"new"} and {file.read_text() for file in own} == {"mine"}
    assert os.readlink(path / TAG / "link") == "elsewhere"
    assert (names_in(path), names_in(path.parent)) == ([TAG, "latest", "notes.txt"], ["a.ckpt"])
    assert names_in(path / TAG) == sorted(["link", "loss_states.pt", "plots", "save_id", *FILES])


def tree(folder: Path) -> dict[str, str | None]:
    """Return what lies in a folder, with the contents of files."""
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["folder", "file", "link", "old leftover"])
def test_what_lies_where_a_save_is_written(kind: str, first: bool, path: Path, tmp_path: Path) -> None:
    """A save is refused before anything changes if somebody else's files have the hidden name; the error names them.

    The leftover of an older version, which has no mark, goes if it holds files of checkpoints only.
    """
    staging = beside(path) if first else path / ".saving"
    if not first:
        save(path, "old")
    in_the_way(tmp_path / "mine" / "precious.txt")
    if kind == "folder":
        in_the_way(staging / "precious.txt")
    elif kind == "file":
        in_the_way(staging)
    elif kind == "link":
        staging.symlink_to(tmp_path / "mine")
    else:
        for name in (*FILES, "notes.txt"):
            in_the_way(staging / "new" / TAG / name)
    before = tree(tmp_path)
    named = {"folder": staging / "precious.txt", "old leftover": staging / "new"}.get(kind, staging)
    with pytest.raises(CheckpointError, match=f"{named} is in the way") as caught:
        save(path, "new")
    assert "Move it elsewhere" in caught.value.remedy and tree(tmp_path) == before
    if kind == "old leftover" and not first:
        (staging / "new" / TAG / "notes.txt").unlink()
    else:
        staging.rename(tmp_path / "moved")
    save(path, "new")
    assert saved(path) == {"new"} and not staging.exists()


@pytest.mark.parametrize("every", long_but([5], [5, 1]))
@pytest.mark.parametrize("then", ["save", "remove"])
@pytest.mark.usefixtures("_file_system")
def test_a_kill_at_any_system_call_leaves_one_save_whole(
    then: str,
    every: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Attack,
    request: pytest.FixtureRequest,
) -> None:
    """A killed first save leaves itself or nothing, a killed second one itself or the first.

    A third save cleans up, and so does whoever removes what is left, by which no whole save goes. The form that always
    runs kills at every fifth call, from a first one that its name decides.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that was written, flushed or not
    for first in (True, False):
        outcomes = set()
        for number in range(random.Random(f"{request.node.name} {first}").randrange(every), 1000, every):
            path = tmp_path / f"{first}-{number}" / "a.ckpt"
            if not first:
                save(path, "old")
                (path / TAG / "notes.txt").write_text("mine")
            survived = not killed_before(number, partial(save, path, "new"), names=SYSTEM_CALLS)
            whole = frozenset(saved(path)) if path.exists() else None
            outcomes.add(whole)
            if then == "save":
                save(path, "third")
                whole = frozenset({"third"})
                assert (names_in(path.parent), names_in(path)) == (["a.ckpt"], [TAG, "latest"])
            else:
                remove_interrupted(path, TAG)
                assert not list(path.parent.rglob(".saving*"))
            assert (frozenset(saved(path)) if path.exists() else None) == whole
            assert first or (path / TAG / "notes.txt").read_text() == "mine"
            if survived:
                break
        attack(
            "kill at every system call of a swap of saves",
            tries=number // every,
            outcome="the old or the new one is whole",
        )
        assert survived and outcomes == {None if first else frozenset({"old"}), frozenset({"new"})}


def test_a_machine_without_the_first_save_gets_its_part(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another machine has put a first save in place before a kill, all machines do so."""
    error = StorageTimeoutError("The process ends here.", "Wait.")  # which leaves the folder, as a kill does
    with patch.object(folder_swap, "put_save_in_place", side_effect=error), suppress(StorageTimeoutError):
        save(path, "new")
    (save_id,) = {id_of(room / TAG) for room in rooms_in(beside(path))}
    other = PartsHere(save_id, None, newer_beside=False)
    monkeypatch.setattr(
        folder_swap, "gather", lambda value, _: [value, [other]] if isinstance(value, list) else [value]
    )
    remove_interrupted(path, TAG)
    assert saved(path) == {"new"} and not list(tmp_path.rglob(".saving*"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("before", [True, False])
def test_a_power_loss_within_a_save_under_another_tag(before: bool, seed: int, tmp_path: Path, attack: Attack) -> None:
    """At every moment ``latest`` names a whole save: the last one of another tag, or the new one, which is kept."""
    disk, found = RecordedDisk(tmp_path, seed=seed), []
    path = disk.folder / "a.ckpt"
    if before:
        save(path, "older")
    save(path, "old", "other")

    def look() -> None:
        with disk.after_power_loss() as folder:
            tag = (folder / "a.ckpt" / "latest").read_text()
            restore_interrupted(folder / "a.ckpt", tag)
            found.append((tag, *{(folder / "a.ckpt" / tag / name).read_text() for name in FILES}))

    with observed(look):
        save(path, "new")
    look()
    disk.close()
    attack(
        "power loss within a save under another tag",
        tries=len(found),
        outcome="the last save is whole, or the new one",
    )
    assert {*found} == {("other", "old"), (TAG, "new")} == {found[0], found[-1]} and found[0][0] == "other"


def test_a_power_loss_leaves_no_staging_folder_of_which_nobody_knows_who_made_it(tmp_path: Path) -> None:
    """What is flushed in a staging folder is found with its mark, so that the next save may remove it."""
    disk = RecordedDisk(tmp_path, seed=1)
    staging = disk.folder / ".saving"
    with locked(staging, disk.folder):
        flush(disk.folder)
        (staging / "new").mkdir()
        (staging / "new" / "model.pt").write_text("half")
        flush_tree(staging / "new")
        for _ in range(20):
            with disk.after_power_loss() as folder, locked(folder / ".saving", folder):
                assert mark_of(folder / ".saving").exists()
    disk.close()


@pytest.mark.parametrize("first", [True, False])
def test_a_save_that_raises_changes_nothing(first: bool, path: Path) -> None:
    """The error is passed on, the folder stays as it was and nothing lies beside it."""
    if not first:
        save(path, "old")
    with pytest.raises(ZeroDivisionError), saving(path, "new"):
        _ = 1 // 0
    assert names_in(path.parent) == ([] if first else ["a.ckpt"])
    assert first or (saved(path) == {"old"} and not (path / ".saving").exists())


# ---- two saves to one path


@pytest.mark.parametrize("first", [True, False])
def test_a_second_save_to_a_path_that_another_one_writes(first: bool, path: Path) -> None:
    """It is refused, whichever began, the first one is whole, and a third succeeds."""
    if not first:
        save(path, "old")
    with (
        saving(path, "first"),
        pytest.raises(StorageLockedError, match=f"Another process is writing to {path} now"),
    ):
        save(path, "second")
    assert saved(path) == {"first"}
    save(path, "third")
    assert saved(path) == {"third"} and names_in(path.parent) == ["a.ckpt"]


def test_a_folder_that_another_save_made_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that looked before another one ended looks again once it has the lock, and exchanges the subfolder."""
    looked = folder_swap.staging_for

    def late(target: Path, tag: str) -> Path:
        monkeypatch.setattr(folder_swap, "staging_for", looked)
        staging = looked(target, tag)
        save(path, "other")
        in_the_way(path / "notes.txt")
        return staging

    monkeypatch.setattr(folder_swap, "staging_for", late)
    save(path, "new")
    assert saved(path) == {"new"} and (path / "notes.txt").exists() and names_in(path.parent) == ["a.ckpt"]


def test_a_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save goes on without a lock where the file system has none."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    for content in ("old", "new"):
        save(path, content)
        assert saved(path) == {content}


def test_two_processes_that_save_to_one_path(tmp_path: Path, attack: Attack) -> None:
    """Every save that is reported done is whole, the other process's is refused, and a further save succeeds."""
    rounds = 3
    attack("two processes save to one path at once", tries=rounds, outcome="each save is whole or refused")
    for number in range(rounds):
        path = tmp_path / str(number) / "a.ckpt"
        children = [fork_saves(path, name=name, seed=2 * number + k) for k, name in enumerate(("first", "second"))]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        (content,) = saved(path)
        assert content.startswith(("first", "second"))
        save(path, "third")
        assert saved(path) == {"third"} and (names_in(path), names_in(path.parent)) == ([TAG, "latest"], ["a.ckpt"])


def fork_saves(path: Path, *, name: str, seed: int) -> int:
    """Save many times in a fork, with delays between its system calls. It exits with 1 if a save is not as it should.

    The other process may replace a save as soon as that is done. So what is found then is whole, whosever it is.
    """
    child = os.fork()
    if child:
        return child
    status, chance = 1, random.Random(seed)
    try:
        for call in SYSTEM_CALLS:
            setattr(os, call, delayed(getattr(os, call), chance))
        for number in range(5):
            with suppress(StorageLockedError):
                save(path, f"{name} {number}")
        status = 0
    finally:
        os._exit(status)


def delayed(call: Callable[..., Any], chance: random.Random) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        time.sleep(chance.random() * 0.004)
        return call(*args, **kwargs)

    return wrapper


# ---- paths


@pytest.mark.usefixtures("_file_system")
@pytest.mark.parametrize("call", ["rename", "replace", "fsync", "unlink", "rmdir"])
def test_a_swap_that_fails(call: str, tmp_path: Path, attack: Attack) -> None:
    """Whichever call of a swap fails, the path has a whole checkpoint, and the next save succeeds."""
    original, tries = getattr(os, call), 0
    for number in range(50):
        path = tmp_path / str(number) / "a.ckpt"
        save(path, "old")
        calls, failed = 0, False

        def failing(*args: Any, number: int = number, **kwargs: Any) -> Any:
            nonlocal calls, failed
            calls += 1
            if calls > number and not failed:
                failed = True
                raise OSError(errno.EIO, "Input/output error")
            return original(*args, **kwargs)

        with patch.object(os, call, failing), suppress(CheckpointError):
            save(path, "new")
        if not failed:
            break
        tries += 1
        assert saved(path) in ({"old"}, {"new"})
        save(path, "newest")
        assert saved(path) == {"newest"} and names_in(path) == [TAG, "latest"]
    assert tries or call == "rename"  # of which an exchange needs none
    attack("a call of a checkpoint's swap fails", tries=tries, outcome="CheckpointError; a whole checkpoint is there")


def test_a_removal_that_comes_late(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that was given up holds the lock until it has returned, and removes nothing of the next save."""
    answers, fwalk = threading.Event(), os.fwalk

    def hanging(*args: Any, **kwargs: Any) -> Any:
        answers.wait()
        return fwalk(*args, **kwargs)

    monkeypatch.setattr(os, "fwalk", hanging)
    monkeypatch.setattr(in_time, "completed_requests", lambda _: 0)
    monkeypatch.setattr(in_time, "counters_of", lambda _: tmp_path)
    with pytest.raises(ZeroDivisionError), io_limit(0.2), saving(old, "new"):
        _ = 1 // 0
    with pytest.raises((StorageLockedError, StorageTimeoutError)):
        save(old, "new")
    assert [(room / TAG).exists() for room in rooms_in(old / ".saving")] == [True]
    answers.set()
    await_that(lambda: not is_in_use(old / ".saving"))
    save(old, "new")
    assert saved(old) == {"new"}


def test_a_reader_between_the_two_renames_of_a_save(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the new save, and does not put the old one back, by which the save would fail."""
    monkeypatch.setattr(replacement, "exchange", lambda first, second: False)
    rename, found = os.rename, queue.SimpleQueue[set[str]]()

    def slow_rename(source: Path, target: Path, **where: Any) -> None:
        rename(source, target, **where)
        if Path(source) == old / TAG:
            threading.Thread(target=lambda: found.put(saved(old))).start()
            time.sleep(0.3)

    monkeypatch.setattr(os, "rename", slow_rename)
    save(old, "new")
    assert found.get(timeout=LIMIT) == {"new"}


def test_a_room_that_is_listed_and_gone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save killed between the two renames is rolled back beside it, as on a file system that remembers names.

    A staging folder that cannot be read is read again, and is an error before anything in it is removed.
    """
    staging, scandir, iterdir = old / ".saving", os.scandir, Path.iterdir
    (staging / "killed").mkdir(parents=True)
    mark_of(staging).touch()
    os.rename(old / TAG, staging / "killed/.saving-previous")

    @contextmanager
    def listing(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        gone = folder / "gone"
        gone.mkdir()
        with scandir(folder) as entries:
            listed = list(entries)
        gone.rmdir()
        yield listed

    with (
        patch.object(os, "scandir", side_effect=OSError(errno.EIO, "Input/output error")),
        pytest.raises(StorageError, match=r"Reading '.*\.saving' failed: Input/output error"),
    ):
        save(old, "new")
    with patch.object(os, "scandir", side_effect=[OSError(errno.ESTALE, "Stale file handle"), listing(staging)]):
        assert saved(old) == {"old"}
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / "gone", *iterdir(folder)]))
    remove_content(staging)
    assert os.listdir(staging) == [staging.name]


def test_what_somebody_removes_within_a_save(old: Path) -> None:
    """A save of which something is gone is not reported as saved."""
    with (
        pytest.raises(CheckpointError, match=r"could not be written: .*No such file or directory"),
        saving(old, "new") as staging,
    ):
        shutil.rmtree(staging)
    assert saved(old) == {"old"}


def in_the_way(path: Path) -> None:
    """Write a file of the user's, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")


@pytest.mark.parametrize(
    ("name", "tag", "file", "told"),
    [
        ("a.ckpt", TAG, "a.ckpt", r"a\.ckpt is a file"),
        ("a.ckpt", TAG, f"a.ckpt/{TAG}", f"{TAG} is a file"),
        *(("a.ckpt", TAG, f"a.ckpt/{each}/notes.txt", f"{each} is a folder") for each in FILES_BESIDE),
        ("n" * 300, TAG, "notes.txt", r"n could not be written: .*too long"),
        *(("a.ckpt", each, "notes.txt", "is not the name of a folder") for each in ("a/b", "", "..", "/a")),
    ],
)
def test_paths_and_tags_that_cannot_be_saved_to(name: str, tag: str, file: str, told: str, tmp_path: Path) -> None:
    """They are refused by name before anything is written, and the user's files stay."""
    in_the_way(tmp_path / file)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        save(tmp_path / name, "new", tag)
    assert tree(tmp_path) == before


def test_a_link_is_saved_through(old: Path, tmp_path: Path) -> None:
    """A save to a link, as Lightning's last.ckpt may be, replaces the linked checkpoint and keeps the link."""
    (tmp_path / "last.ckpt").symlink_to(old)
    save(tmp_path / "last.ckpt", "new")
    assert (tmp_path / "last.ckpt").is_symlink() and saved(old) == {"new"}


# ---- which save machines go to that have parts of two saves in place


def machine(in_place: str | None, beside: str | None = None, *, newer: bool = False) -> PartsHere:
    return PartsHere(in_place, beside, newer)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([machine("a", "b"), machine("a")], None),
        ([machine("b", "a"), machine("a", "b", newer=True)], "b"),
        ([machine("a", "b", newer=True), machine("b", "a")], "b"),
        ([machine("b", "a"), machine("a")], "a"),
        ([machine("b"), machine("a", "b", newer=True), machine("b", "a")], "b"),
        ([machine("b"), machine("a")], None),
        ([machine("a", "c", newer=True), machine("b", "c", newer=True)], None),
        ([machine("b"), machine(None, "b", newer=True)], "b"),
        ([machine("b"), machine(None)], None),
    ],
    ids=[
        "an interrupted save that nobody has in place",
        "both are whole, the first machine has the new one",
        "both are whole, the first machine has the old one",
        "the new one is not whole",
        "three machines",
        "nothing in common",
        "a save of which nobody knows that it is whole",
        "an older version made the old one",
        "an older version, and the new one is not whole",
    ],
)
def test_the_save_that_machines_go_to(machines: list[PartsHere], expected: str | None) -> None:
    """It is the newest that all of them have and one has in place; None where all agree, or have none in common."""
    assert common_save(machines) == expected
