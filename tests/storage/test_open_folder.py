"""What others put into a storage folder, where this package keeps its files, is neither used nor followed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage import UnnamedFiles, recover_store
from lightning_smartinfinity.storage.folders import open_folder
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.folders.replacement import beside
from lightning_smartinfinity.storage.jobs.jobs import find_jobs
from lightning_smartinfinity.storage.state.opening import find_resumable
from lightning_smartinfinity.storage.state.scrub import scrub_rank
from tests.helpers import power_loss
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.native.builds import in_fork
from tests.storage.makers import commit_generation, create, created, flipped, left, manifest_with, recovered, tree

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


def make_tensor_files(storage: list[Path]) -> UnnamedFiles:
    return UnnamedFiles(storage, job="default", direct_io="off")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o022, 0o277])
def test_folders_and_files(tmp_path: Path, mask: int) -> None:
    """Each storage folder has a fully allocated state file and a manifest; the first has the records, too.

    Folders have mode 0700 and files 0600, whatever the umask. The user's own storage folders are left alone: they may
    have any mode, and may be reached by links.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    folders = [tmp_path / "link", tmp_path / "b" / "deep"]
    with umask(0o022):
        folders[1].mkdir(parents=True)
    with umask(mask), created(folders, rank=3, job="mine", durability="power", keep=True) as store:
        commit_generation(store, 0)
        store.record_training(generation=0, step=0, content=b"", has_steps=True)
        store.keep()
        first, second = (folder / "mine" / "rank-00003" for folder in folders)
        assert tree(second) == {"lock", "manifest.json", "state.bin"}
        assert tree(first) == tree(second) | {"commit.bin", "training-0.bin", "training-1.bin"}
        below = [path for folder in folders for path in (folder / "mine").rglob("*")]
        assert {mode(path) for path in below if path.is_file()} == {0o600}
        assert {mode(path) for path in (first.parent, second.parent, first, second)} == {0o700}
        for device, folder in enumerate((first, second)):
            status = (folder / "state.bin").stat()
            assert status.st_blocks * 512 >= status.st_size == store.extents.file_bytes(device)
            manifest = json.loads((folder / "manifest.json").read_text())
            assert manifest["layout"].pop("numel") == store.extents.numel
            assert [parameter["name"] for parameter in manifest["parameters"]] == ["p0", "p1"]
            told = {"device": device, "folders": list(map(str, folders)), "groups": [{"lr": 0.1}]}
            assert manifest == manifest | told | {"version": 5, "state_format": "fp32", "durability": "power"}
    assert tree(tmp_path) == {"a", "link", "b", "b/deep"} and mode(tmp_path / "a") == 0o777


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
    before = os.lstat(path)
    with pytest.raises(StorageError, match=problem) as caught:
        create([tmp_path / "s"])
    remedy = "a file of its own" if "links" in problem else "Remove"
    assert str(path) in caught.value.problem and remedy in caught.value.remedy
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (before.st_ino, before.st_mode)
    assert {each.read_bytes() for each in (target, path) if each.is_file()} == {PRECIOUS}
    if "regular" in problem and not path.is_dir():
        attack(IN_PLACE, tries=1, outcome=REFUSED)


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
def test_folders_behind_links_are_not_used(
    tmp_path: Path, level: str, attack: Attack, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link in place of the job's or the rank's folder is refused. Its target is unchanged, and each remedy works."""
    left(tmp_path / "elsewhere")
    before = tree(tmp_path / "elsewhere")
    (tmp_path / "s" / level).parent.mkdir(parents=True)
    (tmp_path / "s" / level).symlink_to(tmp_path / "elsewhere" / level)
    for attempt in (create, recover_store, *([make_tensor_files] if level == "default" else [])):
        with pytest.raises(StorageError, match="is a symbolic link, which is not followed") as caught:
            attempt([tmp_path / "s"])
    said = str(caught.value)
    (tmp_path / "s" / "to-itself").symlink_to("to-itself")
    for options, status in ([], 0), (["--verify"], 1), (["--remove", "default"], 1):
        assert main(["jobs", str(tmp_path / "s"), *options]) == status
        assert said.split(". ")[0] in "".join(capsys.readouterr())
    assert main(["scrub", str(tmp_path / "s")]) == 2 and said.split(". ")[0] in capsys.readouterr().err
    assert tree(tmp_path / "elsewhere") == before
    assert said.endswith(f" Or name {str(tmp_path / 'elsewhere')!r} as storage in place of {str(tmp_path / 's')!r}.")
    link = tmp_path / "s" / level
    link.unlink()
    link.symlink_to((tmp_path / "elsewhere" / level).rename(tmp_path / "else"))
    with pytest.raises(StorageError, match=r"not followed.* move the folder '(.*)' to '(.*)'\.$"):
        recover_store([tmp_path / "s"])
    link.unlink()
    (tmp_path / "else").rename(link)
    assert recovered(tmp_path / "s") == 0
    attack(IN_PLACE, tries=1, outcome=REFUSED)


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
    for attempt in (create, *([make_tensor_files] if level == "default" else [])):
        with pytest.raises(StorageError, match=problem) as caught:
            attempt([tmp_path])
    assert folder.is_dir() and (open_mode is None or "chmod -R go-w" in caught.value.remedy)
    attack(OPEN_TO_OTHERS, tries=1, outcome=NAMED)


def test_files_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that belongs to another user is refused."""
    folder = OpenFolder(left(tmp_path))
    folder._owner = 12345  # only root could give a file away
    for attempt in (lambda: folder.read("manifest.json"), lambda: folder.open("state.bin", os.O_RDWR)):
        with pytest.raises(StorageError, match="and not to 12345"):
            attempt()


def as_nobody(call: Callable[[], str]) -> str:
    """Return what a function returns in a process of another user."""
    reading, writing = os.pipe()

    def write() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(writing, call().encode())

    assert in_fork(write) == 0
    os.close(writing)
    with open(reading) as pipe:
        return pipe.read()


@RunIf(root=True)
def test_state_that_only_its_user_may_read() -> None:
    """A job of another user is reported with its owner, and not as missing."""
    with TemporaryDirectory() as name:
        storage = Path(name)
        storage.chmod(0o755)
        folder = left(storage, world_size=1)

        def read() -> str:
            said = [problem for job in find_jobs(storage) for problem in job.problems]
            for attempt in (
                lambda: recover_store([storage]),
                lambda: find_resumable([storage], job="default", rank=0),
                lambda: scrub_rank([folder], rank=0, show=hidden),
                lambda: create([storage]),
            ):
                try:
                    attempt()
                except StorageError as error:
                    said.append(str(error))
            with redirect_stderr(StringIO()) as shown:
                for path in (folder.parent, folder):
                    assert main(["scrub", str(path), "--quiet"]) == 2
            return "\n".join((*said, shown.getvalue().strip()))

        for closed in (storage / "default", folder, folder / "lock"):  # each the first that cannot be read
            said = as_nobody(read).splitlines()
            assert len(said) == 7, said
            assert all(f"{closed}' belongs to user root, and not to" in line for line in said[:1]), said
            assert all(f"{storage}/default" in line and "belongs to user root" in line for line in said), said
            closed.chmod(0o755)


def test_the_folder_stays_the_one_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store goes on in its folder even if another takes its name, and leaves that one alone.

    The process may change its working folder, too.
    """
    monkeypatch.chdir(tmp_path)
    store = create([Path("storage")])
    monkeypatch.chdir("/")
    commit_generation(store, 0)
    (tmp_path / "storage/default").rename(tmp_path / "moved")
    other = rank_folder(tmp_path / "storage")
    (other / "commit.bin").write_bytes(PRECIOUS)
    commit_generation(store, 1)
    store.close(remove=True)
    assert (other / "commit.bin").read_bytes() == PRECIOUS
    assert tree(tmp_path / "moved") == {"rank-00000"}


def without_checksum(values: dict[str, Any]) -> bytes:
    return json.dumps({key: value for key, value in values.items() if key != "crc32"}).encode()


@pytest.mark.parametrize(
    ("changes", "encoded", "said", "status"),
    [
        ({"version": 6}, manifest_with, "written by a newer version", 2),
        ({"version": 6}, without_checksum, "written by a newer version", 2),
        ({"state_format": "int4"}, manifest_with, "in the format 'int4'", 2),
        ({}, lambda _: b"{ damaged", "manifest.json' is not a readable manifest", 1),
    ],
)
def test_a_leftover_that_cannot_be_read(
    changes: dict[str, Any], encoded: Callable[[Any], bytes], said: str, status: int, tmp_path: Path
) -> None:
    """The next run refuses it by name and deletes nothing. A scrub says that it cannot tell of a newer version.

    Whose state a damaged one is cannot be read, so no store is made in its place. A training archives it first.
    """
    path = left(tmp_path) / "manifest.json"
    path.write_bytes(encoded(json.loads(path.read_text()) | changes))
    before = power_loss.content(tmp_path)
    with pytest.raises(StorageError, match=said):
        create([tmp_path])
    assert power_loss.content(tmp_path) == before and main(["scrub", str(tmp_path), "--quiet"]) == status


# Every seventh is each bit of some byte, and a bit of each byte.
@pytest.mark.parametrize(
    ("name", "every"),
    long_but([("lock", 7), ("manifest.json", 31)], [("lock", 7), ("manifest.json", 31), ("manifest.json", 7)]),
)
def test_no_bit_makes_a_kept_store_one_to_be_removed(tmp_path: Path, name: str, every: int, attack: Attack) -> None:
    """Lock and manifest both say that a store is kept, so whichever bit of one flips, the next job removes nothing."""
    store = create([tmp_path], keep=name == "lock")
    commit_generation(store, 0)
    store.keep()  # which may come later than the store, too
    store.close(remove=False)
    folder = tmp_path / "default" / "rank-00000"
    before = power_loss.content(folder)
    others = {file: content for file, content in before.items() if file not in ("lock", name)}
    flips = range(0, 8 * len(before[name]), every)
    attack(f"bit flip in {name} of a kept state, before the next training", tries=len(flips), outcome=REFUSED)
    for number in flips:
        (folder / name).write_bytes(flipped(before[name], number // 8, number % 8))
        with pytest.raises(StorageError):
            create([tmp_path])
        assert others.items() <= power_loss.content(folder).items()
        (folder / "lock").write_bytes(before["lock"])


def test_a_recovered_store_without_its_lock(tmp_path: Path) -> None:
    """The files that the manifest names are deleted with the store, also if the lock file was lost."""
    folder = left(tmp_path)
    (folder / "lock").unlink()
    (folder / "thesis.bin").write_bytes(PRECIOUS)
    assert recovered(tmp_path) == 0 and tree(folder) == {"thesis.bin"}


# ---- folders whose names are no text: bytes that are not UTF-8, which Python shows as lone surrogates

CAFE = os.fsdecode(b"caf\xe9")


@pytest.fixture
def cafe(tmp_path: Path) -> Path:
    (tmp_path / CAFE).mkdir()
    return tmp_path / CAFE


def test_a_store_whose_path_is_no_text(cafe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State is written, found again and scrubbed. Damage is told with the path, in which such bytes are escaped."""
    state = left(cafe, world_size=1) / "state.bin"
    assert state == cafe / "default/rank-00000/state.bin"
    store = recover_store([cafe])
    commit_generation(store, 1)
    store.keep()
    store.close(remove=False)
    assert store.manifest.folders == (str(cafe),) and recovered(cafe, remove=False) == 1
    assert main(["jobs", str(cafe), "--verify", "--quiet"]) == main(["scrub", str(cafe), "--quiet"]) == 0
    os.truncate(state, 8192)
    assert main(["scrub", str(cafe), "--quiet"]) == 1
    assert "caf\\xe9/default/rank-00000/state.bin" in capsys.readouterr().out
    assert main(["jobs", str(cafe), "--remove", "default", "--kept"]) == 0 and not list(cafe.iterdir())


def test_a_gradient_file(cafe: Path) -> None:
    """The file that gradients travel through on a card's SSD is there as well."""
    with ExitStack() as resources:
        file = open_gradient_file(cafe, 8192, resources)
        assert file.direct and Path(file.path).parent == cafe


def test_where_a_new_save_is_written() -> None:
    """Names that are text keep the hidden name that earlier versions gave them."""
    assert beside(Path("/runs/last.ckpt")).name == ".saving-e6f69ff248c8b801"
    assert beside(Path("/runs", CAFE)).name == ".saving-dafd66c0b98965e6"
