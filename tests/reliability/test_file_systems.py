"""Trainings on file systems of every kind, on disks that fail, in folders of odd names, and in folders that moved."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy
from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from tests.helpers.attacks import Attack
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.power_loss import loop_devices_work
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


def interrupted(storage: list[Path], root: Path) -> list[float]:
    """Fit until an exception after the second step; return the losses."""

    def stop(trainer: Any, _: Any) -> None:
        if trainer.global_step == 2:
            raise Stopped

    module, strategy = LitTiny(Recipe()), SmartInfinityStrategy(storage)
    with pytest.raises(Stopped):
        fit(module, root, strategy, callbacks=[does(on_train_batch_start=stop)])
    strategy.close()
    return module.losses


def resumed(storage: list[Path], root: Path, start: str = "storage", job: str = "default") -> list[float]:
    """Resume from storage; return the losses."""
    module, strategy = LitTiny(Recipe()), SmartInfinityStrategy(storage, transfer={"job": job})
    trainer = quiet_trainer(root, strategy)
    trainer.fit(module, ckpt_path=start)
    trainer.save_checkpoint(root / "saved.ckpt")
    strategy.close()
    return module.losses


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
    assert interrupted(storage, root) + resumed(storage, root) == losses
    (root / "saved.ckpt").rename(root / f"{name[:100]}.ckpt")
    saved, exported = root / f"{name[:100]}.ckpt", root / f"out {name[:100]}.ckpt"
    export_checkpoint(saved, exported, ExportSettings(to="lightning"))
    for path in (saved, exported):
        assert main(["scrub", str(path), "--quiet"]) == 0


def exchange(one: Path, other: Path, aside: Path) -> None:
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def files_of(storage: list[Path], job: str) -> dict[str, bytes]:
    """Return the content of a job's files but the locks, by storage folder and name."""
    found = [(folder, path) for folder in storage for path in (folder / job).glob("*/*") if path.name != "lock"]
    return {f"{folder.name}/{path.name}": path.read_bytes() for folder, path in found}


HOW = ["absent", "swapped", "moved", "copied", "in another order", "another training's", "replaced by a new drive"]


@pytest.mark.parametrize("how", HOW)
def test_folders_that_are_elsewhere(how: str, tmp_path: Path, losses: list[float], attack: Attack) -> None:
    """A resume goes on to the same bits, or names what is missing. Put back, it goes on to the same bits.

    A new fit in between deletes nothing.
    """
    attack(
        f"storage folders of an interrupted training are {how}", tries=1, outcome="refused by name, or the same bits"
    )
    storage, away, other = [tmp_path / "a", tmp_path / "b"], tmp_path / "unmounted", tmp_path / "other"
    before, now = interrupted(storage, tmp_path / "run"), storage
    if how == "another training's":
        interrupted([other], tmp_path / "other run")
    if how in ("absent", "another training's", "replaced by a new drive"):
        storage[1].rename(away)
    if how == "another training's":
        other.rename(storage[1])
    elif how == "replaced by a new drive":
        interrupted(storage[1:], tmp_path / "other run")
    elif how == "swapped":
        exchange(*storage, tmp_path / "aside")
    elif how == "in another order":
        now = storage[::-1]
    elif how in ("moved", "copied"):
        now = [tmp_path / "new a", tmp_path / "new b"]
        for old, new in zip(storage, now, strict=True):
            shutil.copytree(old, new)
            if how == "moved":
                shutil.rmtree(old)
    try:
        after = resumed(now, tmp_path / "run")
    except SmartInfinityError as error:
        assert how not in ("moved", "copied") and str(storage[1]) in str(error)
        with pytest.raises(SmartInfinityError, match=re.escape(str(storage[1]))):
            resumed(now, tmp_path / "run", "storage-or-new")
        left = files_of(now, "default")
        interrupted(now, tmp_path / "new run")
        assert files_of(now, "default.aside") == left
        if how == "swapped":
            exchange(*storage, tmp_path / "aside")
        elif away.exists():
            storage[1].rename(other)
            away.rename(storage[1])
        after = resumed(storage, tmp_path / "run", job="default.aside")
    assert before + after == losses
    assert how != "copied" or before + resumed(storage, tmp_path / "run") == losses
