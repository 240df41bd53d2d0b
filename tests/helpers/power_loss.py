"""Shows what a power loss would leave of a folder: nothing but what was flushed, as far as it is certain.

A :class:`LoopDisk` is an ext4 file system of its own. What the kernel has written to its image file is what a disk
without a volatile cache would hold. A :class:`RecordedDisk` runs everywhere: it records what is flushed, and drops,
reorders or tears the rest.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lightning_smartinfinity import native
from tests.helpers.waiting import PROCESS_LIMIT

_BLOCK = 4096
_IMAGE_BYTES = 192 << 20
# No commit every five seconds, and no flush that ext4 adds to renames for programs that forget it.
_MOUNT_OPTIONS = "loop,commit=3000,noauto_da_alloc"


class LoopDisk:
    """An ext4 file system in an image file, which needs the right to mount.

    Args:
        where: Folder for the image and the mount points.
    """

    def __init__(self, where: Path) -> None:
        memory = Path("/dev/shm")
        self._images = ExitStack()
        root = memory if memory.is_dir() and os.access(memory, os.W_OK) else where
        self._root = Path(self._images.enter_context(tempfile.TemporaryDirectory(dir=root)))
        self._image = self._root / "disk"
        _make_file_system(self._image)
        self.folder = where / "disk"
        self._images.enter_context(_mounted(self._image, self.folder))

    def close(self) -> None:
        """Unmount and delete the image."""
        self._images.close()

    @contextmanager
    def after_power_loss(self) -> Iterator[Path]:
        """Yield the folder of a copy of the image, which the kernel has recovered."""
        with tempfile.TemporaryDirectory(dir=self._root) as root:
            copy, folder = Path(root, "copy"), Path(root, "mount")
            _run("cp", "--sparse=always", str(self._image), str(copy))
            with _mounted(copy, folder):
                yield folder


class RecordedDisk:
    """A folder whose flushes are recorded, by replacing the calls that flush.

    Args:
        where: Folder in which :attr:`folder` and images are made.
        seed: 0 for images without anything that was not flushed. Other numbers choose for each entry of a folder and
            each block of a file whether it was written, so that writes are dropped, reordered and torn.
    """

    def __init__(self, where: Path, *, seed: int = 0) -> None:
        self._where = where
        self._random = random.Random(seed) if seed else None
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._held: dict[int, int] = {}  # descriptors: an inode that is held is not given to another file
        self._replaced = ExitStack()
        self.folder = where / "disk"
        self.folder.mkdir()
        for name in ("fsync", "fdatasync"):
            self._replaced.enter_context(mock.patch.object(os, name, self._recording(getattr(os, name))))
        self._replaced.enter_context(mock.patch.object(native.StateFile, "sync", self._recording_file()))
        self._record_folder(str(self.folder))

    def close(self) -> None:
        """Record no longer."""
        self._replaced.close()
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    @contextmanager
    def after_power_loss(self) -> Iterator[Path]:
        """Yield a folder with what was flushed, and by chance some of the rest."""
        live = {self.folder.stat().st_ino: self.folder}
        live |= {path.lstat().st_ino: path for path in self.folder.rglob("*")}
        with tempfile.TemporaryDirectory(dir=self._where) as root:
            self._rebuild(self.folder.stat().st_ino, Path(root, "disk"), live)
            yield Path(root, "disk")

    # ---- recording

    def _recording(self, flush: Callable[[int], None]) -> Callable[[int], None]:
        def flushing(descriptor: int) -> None:
            flush(descriptor)
            self._record(f"/proc/self/fd/{descriptor}")

        return flushing

    def _recording_file(self) -> Callable[[Any], None]:
        sync = native.StateFile.sync

        def flushing(file: Any) -> None:
            sync(file)
            self._record(str(file.path))

        return flushing

    def _record(self, path: str) -> None:
        if not Path(path).resolve().is_relative_to(self.folder.resolve()):
            return
        if os.path.isdir(path):
            self._record_folder(path)
        else:
            self._files[self._hold(path)] = Path(path).read_bytes()

    def _record_folder(self, path: str) -> None:
        real = os.path.realpath(path)
        self._folders[self._hold(path)] = {name: self._hold(os.path.join(real, name)) for name in os.listdir(real)}

    def _hold(self, path: str) -> int:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        inode = os.fstat(descriptor).st_ino
        if inode in self._held:
            os.close(descriptor)
        else:
            self._held[inode] = descriptor
        return inode

    # ---- images

    def _rebuild(self, inode: int, target: Path, live: dict[int, Path]) -> None:
        path = live.get(inode)
        if inode in self._folders or (path is not None and path.is_dir()):
            target.mkdir()
            for name, entry in self._entries(inode, path).items():
                self._rebuild(entry, target / name, live)
        else:
            target.write_bytes(self._bytes(inode, path))

    def _entries(self, inode: int, path: Path | None) -> dict[str, int]:
        flushed = self._folders.get(inode, {})
        if self._random is None:
            return flushed
        now = {} if path is None else {entry.name: entry.lstat().st_ino for entry in path.iterdir()}
        chosen = {name: self._random.choice((flushed, now)).get(name) for name in sorted({*flushed, *now})}
        return {name: entry for name, entry in chosen.items() if entry is not None}

    def _bytes(self, inode: int, path: Path | None) -> bytes:
        flushed = self._files.get(inode, b"")
        if self._random is None or path is None:
            return flushed
        now = path.read_bytes()
        if now == flushed:
            return flushed
        blocks = []
        for begin in range(0, len(self._random.choice((flushed, now))), _BLOCK):
            before, after = flushed[begin : begin + _BLOCK], now[begin : begin + _BLOCK]
            blocks.append(before if before == after else self._random.choice((before, after, bytes(_BLOCK))))
        return b"".join(blocks)


Disk = LoopDisk | RecordedDisk
"""A folder whose content after a power loss can be looked at."""

DISKS: dict[str, type[Disk]] = {"ext4 on a loop device": LoopDisk, "recorded flushes": RecordedDisk}


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, except those of an unfinished save."""
    files = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    named = {str(file.relative_to(folder)): file for file in files}
    return {name: file.read_bytes() for name, file in named.items() if not name.startswith(".saving")}


@contextmanager
def observed(look: Callable[[], None]) -> Iterator[None]:
    """Call a function before and after every call that flushes or renames, except for those that it makes itself."""
    is_looking = False

    def look_once() -> None:
        nonlocal is_looking
        if not is_looking:
            is_looking = True
            try:
                look()
            finally:
                is_looking = False

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            look_once()
            try:
                return original(*args, **kwargs)
            finally:
                look_once()

        return call

    with ExitStack() as replaced:
        for name in ("fsync", "fdatasync", "rename", "replace"):
            replaced.enter_context(mock.patch.object(os, name, looking(getattr(os, name))))
        replaced.enter_context(mock.patch.object(native.StateFile, "sync", looking(native.StateFile.sync)))
        yield


@functools.cache
def loop_devices_work() -> bool:
    """Tell whether this process may mount an image file."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _make_file_system(Path(folder, "disk"))
            with _mounted(Path(folder, "disk"), Path(folder, "mount")):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def _make_file_system(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-b", str(_BLOCK), "-E", "lazy_itable_init=1", str(image))


@contextmanager
def _mounted(image: Path, folder: Path) -> Iterator[None]:
    folder.mkdir()
    _run("mount", "-o", _MOUNT_OPTIONS, str(image), str(folder))
    try:
        yield
    finally:
        # Some files may be open still: io_uring closes its own after the ring was closed, and a test may have failed.
        _run("umount", "--lazy", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=PROCESS_LIMIT)
