"""Trainings on file systems of every kind, on disks that fail, in folders of odd names, and in folders that moved."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy
from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from tests.helpers.attacks import Attack
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.power_loss import loop_devices_work
from tests.helpers.ranks import on_ranks
from tests.helpers.runif import NO_FILE_SYSTEM, NO_LOOP_DEVICE
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.waiting import PROCESS_LIMIT
from tests.training.actions import does
from tests.training.storage_worker import StorageRun, end_of, launch

pytestmark = pytest.mark.long
BYTES = 320 << 20  # XFS takes no less
MAKERS = {"ext4": ["mkfs.ext4", "-q", "-N", "256"], "xfs": ["mkfs.xfs", "-q"], "btrfs": ["mkfs.btrfs", "-q"]}
KINDS = [*MAKERS, "xfs with 4 KiB sectors", "tmpfs", "overlayfs"]


def call(*command: str | Path) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PROCESS_LIMIT)
    return done.stdout.strip()


class Disk:
    """A file system of its own, which needs the right to mount.

    Args:
        kind: One of :data:`KINDS`.
        scratch: Folder for the image and the mount point.

    Attributes:
        folder: The mount point.
    """

    def __init__(self, kind: str, scratch: Path) -> None:
        name, *sectors = kind.split()
        self.folder, self._image, self._device = scratch / "disk", scratch / "image", ""
        self._sector = ["--sector-size", "4096"] if sectors else []
        self.folder.mkdir()
        if not loop_devices_work():
            pytest.skip(NO_LOOP_DEVICE)
        if name == "tmpfs":
            call("mount", "-t", "tmpfs", "none", self.folder)
        elif name == "overlayfs":
            # The layers are on a tmpfs: not every file system can be one.
            call("mount", "-t", "tmpfs", "none", self.folder)
            layers = {layer: self.folder / layer for layer in ("lowerdir", "upperdir", "workdir")}
            for layer in layers.values():
                layer.mkdir()
            options = ",".join(f"{key}={layer}" for key, layer in layers.items())
            call("mount", "-t", "overlay", "none", "-o", options, self.folder)
        elif shutil.which(MAKERS[name][0]) is None:
            pytest.skip(f"{NO_FILE_SYSTEM}: {MAKERS[name][0]} is not installed")
        else:
            self._image.touch()
            os.truncate(self._image, BYTES)
            self._attach()
            call(*MAKERS[name], self._device)
            call("mount", self._device, self.folder)

    def _attach(self) -> None:
        self._device = call("losetup", "--find", "--show", *self._sector, self._image)

    def close(self) -> None:
        """Unmount everything, whatever is open there."""
        with suppress(subprocess.CalledProcessError):
            while os.path.ismount(self.folder):
                call("umount", "--lazy", self.folder)
        if self._device:
            call("losetup", "--detach", self._device)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leave no free block."""
        filler = self.folder / "filler"
        with filler.open("wb") as file, suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
                        file.flush()
        yield
        filler.unlink()

    @contextmanager
    def without_inodes(self) -> Iterator[None]:
        """Leave no inode for a new file."""
        filler = self.folder / "filler"
        filler.mkdir()
        with suppress(OSError):
            for number in range(1 << 20):
                (filler / str(number)).touch()
        yield
        shutil.rmtree(filler)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Make it read-only."""
        call("mount", "-o", "remount,ro", self.folder)
        yield
        call("mount", "-o", "remount,rw", self.folder)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Let reads and writes of the device fail with EIO, until it is mounted again with what it held."""
        call("sync", "-f", self.folder)
        held = self._image.with_name("held")
        call("cp", "--sparse=always", self._image, held)
        os.truncate(self._image, 4096)
        call("losetup", "--set-capacity", self._device)
        yield
        self.close()
        held.replace(self._image)
        self._attach()
        call("mount", self._device, self.folder)


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    """Return what makes a file system of a kind."""
    with ExitStack() as stack:

        def make(kind: str) -> Disk:
            disk = Disk(kind, tmp_path)
            stack.callback(disk.close)
            return disk

        yield make


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the end of a fit that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    launch(StorageRun(out=str(folder), storage=str(folder / "storage"), epochs=1), ends=0)
    return end_of(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*tmpfs")
def test_a_training(
    kind: str, disk_of: Callable[[str], Disk], straight: dict[str, Any], attack: Attack, tmp_path: Path
) -> None:
    """A fit that is killed resumes to the same bits, and its checkpoint is whole, and so is an export of it."""
    attack(f"kill, resume, save, scrub and export on {kind}", tries=1, outcome="the same bits, all files whole")
    folder = disk_of(kind).folder
    settings: dict[str, Any] = {"epochs": 1, "transfer": {"keep": "on-failure"}, "save_every": 2}
    out, storage = str(folder / "run"), str(folder / "storage")
    launch(StorageRun(out=out, storage=storage, kill_at="kill at step", kill_step=3, **settings))
    assert main(["scrub", storage, "--quiet"]) == 0
    launch(StorageRun(out=out, storage=storage, resume=True, seed=9, **settings), ends=0)
    assert end_of(Path(out)) == straight
    assert main(["export", "--to", "lightning", f"{out}/last.ckpt", f"{out}/export.ckpt"]) == 0
    for name in ("last.ckpt", "export.ckpt"):
        assert main(["scrub", f"{out}/{name}", "--quiet"]) == 0


FAILURES = {
    "full": (Disk.full, "space"),
    "without a free inode": (Disk.without_inodes, "space"),
    "read-only": (Disk.read_only, "read-only"),
    "broken (EIO)": (Disk.broken, ""),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_disk_that_takes_no_more(
    failure: str, disk_of: Callable[[str], Disk], tmp_path: Path, attack: Attack
) -> None:
    """A set-up, a save over a checkpoint and an export raise an error with the folder; the old checkpoint is whole.

    Afterwards each of them works.
    """
    disk = disk_of("ext4")
    what = f"a set-up, a save and an export on a disk that is {failure}"
    attack(what, tries=3, outcome="an error with the folder's name; what was there is whole")
    saved, root = disk.folder / "a.ckpt", tmp_path / "run"
    trainer = fit(LitTiny(Recipe()), root)
    trainer.save_checkpoint(saved)

    def set_up() -> None:
        strategy = SmartInfinityStrategy(disk.folder / "storage", transfer={"keep": False})
        fit(LitTiny(Recipe()), tmp_path / "other", strategy)
        strategy.close()

    def export() -> None:
        export_checkpoint(saved, disk.folder / "export.ckpt", ExportSettings(to="lightning"))

    actions: list[Callable[[], object]] = [lambda: trainer.save_checkpoint(saved), export, set_up]
    fail, told = FAILURES[failure]
    with fail(disk):
        for act in actions:
            with pytest.raises(SmartInfinityError) as caught:
                act()
            assert str(disk.folder) in str(caught.value) and told in str(caught.value).lower()
    assert main(["scrub", str(saved), "--quiet"]) == 0
    for act in actions:
        act()
    assert main(["scrub", str(saved), "--quiet"]) == 0


NAMES = [
    *(
        "with space",
        "two  spaces ",
        "-rf",
        "--job",
        "a,b",
        "it's",
        'a"b',
        "a\\b",
        "a%sb",
        "{0}",
        "$HOME it",
        "#x",
        "a:b",
    ),
    *("new\nline", "tab\t", "\x1b[31m", "\u202eabc", "caf\u00e9", "cafe\u0301", "\U0001f600", os.fsdecode(b"caf\xe9")),
    *("*?[a]", "~", "nul", "x" * 200, "a.ckpt.", "...", "storage", "storage-or-new"),
]


class Stopped(Exception):
    """An exception in the user's code."""


def interrupted(root: Path, *storage: str | Path) -> list[float]:
    """Fit until an exception after the second step; return the losses of this rank."""

    def stop(trainer: Any, _: Any) -> None:
        if trainer.global_step == 2:
            raise Stopped

    module, strategy = LitTiny(Recipe()), SmartInfinityStrategy(list(storage))
    with pytest.raises(Stopped):
        fit(module, root, strategy, callbacks=[does(on_train_batch_start=stop)], devices=num_ranks())
    strategy.close()
    return module.losses


def resumed(root: Path, start: str, job: str, *storage: str | Path) -> list[float] | str:
    """Resume; return the losses of this rank, or the error if there is one."""
    module, strategy = LitTiny(Recipe()), SmartInfinityStrategy(list(storage), transfer={"job": job})
    trainer = quiet_trainer(root, strategy, devices=num_ranks())
    try:
        trainer.fit(module, ckpt_path=start)
    except SmartInfinityError as error:
        return str(error)
    trainer.save_checkpoint(root / "saved.ckpt")
    strategy.close()
    return module.losses


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a fit that nothing interrupts."""
    module = LitTiny(Recipe())
    fit(module, tmp_path_factory.mktemp("losses"))
    return module.losses


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_odd_names(name: str, tmp_path: Path, losses: list[float], attack: Attack) -> None:
    """A fit that is interrupted in a folder of this name resumes; its checkpoint there and an export are whole."""
    attack(
        "folder of an odd name for state, checkpoints and exports", tries=1, outcome="the same bits, all files whole"
    )
    root = tmp_path / name
    storage = [root / name, tmp_path / f"{name}2"]
    assert [*interrupted(root, *storage), *resumed(root, "storage", "default", *storage)] == losses
    (root / "saved.ckpt").rename(root / f"{name[:100]}.ckpt")
    saved, exported = root / f"{name[:100]}.ckpt", root / f"out {name[:100]}.ckpt"
    export_checkpoint(saved, exported, ExportSettings(to="lightning"))
    for path in (saved, exported):
        assert main(["scrub", str(path), "--quiet"]) == 0


# ---- folders of an interrupted training that are not where they were


class Folders:
    """The storage folders of an interrupted training, two for each rank, which :meth:`place` puts back and moves.

    Args:
        scratch: A folder.
        ranks: Number of ranks.

    Attributes:
        storage: The folders.
        before: The losses of each rank until it was interrupted.
        after: Those of the steps that follow, in a fit that nothing interrupts.
    """

    def __init__(self, scratch: Path, ranks: int) -> None:
        self.root, self.ranks, self._kept = scratch / "run", ranks, scratch / "kept"
        self.storage = [scratch / "storage" / name for name in "ab"]
        everything = self.call(uninterrupted)
        self.before = self.call(interrupted, *self.storage)
        self.after = [losses[2:] for losses in everything]
        shutil.copytree(scratch / "storage", self._kept)

    def call(self, function: Callable[..., Any], *arguments: str | Path) -> list[Any]:
        """Return what a function returns on each rank."""
        if self.ranks == 1:
            return [function(self.root, *arguments)]
        self.root.mkdir(exist_ok=True)
        return on_ranks(function, self.root, *arguments)

    def place(self, how: str) -> list[Path]:
        """Put them where they are after something has happened, and return the folders that a user names."""
        for folder in (self.root, self.storage[0].parent):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._kept, self.storage[0].parent)
        named = {name: self.storage[0].parent / name for name in (*"abcd", "aside", "unmounted")}
        if how == "another training's":
            interrupted(self.root, named["aside"])
        for old, new in map(str.split, MOVES.get(how, ())):
            (shutil.copytree if how == "copied" else Path.rename)(named[old], named[new])
        if how == "replaced by a new drive":
            interrupted(self.root, named["b"])
        return [named[name] for name in {"moved": "cd", "copied": "cd", "in another order": "ba"}.get(how, "ab")]


MOVES = {
    "absent": ["b unmounted"],
    "swapped": ["a aside", "b a", "aside b"],
    "moved": ["a c", "b d"],
    "copied": ["a c", "b d"],
    "another training's": ["b unmounted", "aside b"],
    "replaced by a new drive": ["b unmounted"],
}
"""Which folder is renamed to which, or copied."""


def uninterrupted(root: Path) -> list[float]:
    module = LitTiny(Recipe())
    fit(module, root, devices=num_ranks()).strategy.close()
    return module.losses


def files_of(storage: list[Path], job: str) -> dict[str, bytes]:
    """Return the content of a job's files but the locks, by storage folder and name."""
    found = [(folder, path) for folder in storage for path in (folder / job).glob("*/*") if path.name != "lock"]
    return {f"{folder.name}/{path.parent.name}/{path.name}": path.read_bytes() for folder, path in found}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Folders]:
    """Return a function that trains once for each number of ranks, and returns the folders of that training."""
    return cache(lambda ranks: Folders(tmp_path_factory.mktemp(f"folders of {ranks}"), ranks))


HOW = ["absent", "swapped", "moved", "copied"]
LOST = ["absent", "another training's", "replaced by a new drive"]
CASES = [*product(HOW, (1, 2)), *((how, 1) for how in ("in another order", *LOST[1:]))]
OUTCOMES = {
    "jobs": "the right folders are named, or those named are right",
    "scrub": "whole, or what is missing is named",
    "a resume": "refused with the right folders or what is missing, or the same bits",
    "a new fit": "archived as a whole, and resumed to the bit when put back",
}


@pytest.mark.parametrize(("how", "ranks"), CASES)
def test_folders_that_are_elsewhere(
    how: str, ranks: int, folders: Callable[[int], Folders], capsys: pytest.CaptureFixture[str], attack: Attack
) -> None:
    """A resume goes on to the same bits, or names what is missing. Put back, it goes on to the same bits.

    ``jobs`` and ``scrub`` agree. A new fit in between deletes nothing.
    """
    for action, outcome in OUTCOMES.items():
        attack(f"storage folders of an interrupted training are {how}, then {action}", tries=1, outcome=outcome)
    training = folders(ranks)
    now, (a, b) = training.place(how), training.storage
    order, lacks = f"in this order: storage={[str(b), str(a)]!r}", f"{str(b)!r} lacks its part. Mount {str(b)!r}"
    capsys.readouterr()
    assert main(["jobs", *map(str, filter(Path.exists, now))]) == 0
    listed = capsys.readouterr().out
    assert main(["scrub", *map(str, filter(Path.exists, now)), "--quiet"]) == (2 if how in LOST else 0)
    scrubbed = "".join(capsys.readouterr())
    for said in (listed, scrubbed):
        assert ((lacks in said), (order in said)) == (how in LOST, how == "swapped"), said
    assert how == "absent" or listed.count("resumable, step 2") == 1, listed
    assert "amaged" not in listed + scrubbed and ("Whole." in scrubbed) == (how not in LOST)
    after = training.call(resumed, "storage", "default", *now)
    if how in ("moved", "copied"):
        assert after == training.after
        assert how == "moved" or training.call(resumed, "storage", "default", a, b) == training.after
    else:
        again = training.call(resumed, "storage-or-new", "default", *now)
        assert all(isinstance(said, str) and str(b) in said for said in (*after, *again)), after + again
    left = files_of(training.place(how), "default")
    training.call(interrupted, *now)
    assert files_of(now, "default.aside") == left
    if how in LOST:
        shutil.rmtree(b)
        (a.parent / "unmounted").rename(b)
    now = now[::-1] if how in ("swapped", "in another order") else now
    assert training.call(resumed, "storage", "default.aside", *now) == training.after
