"""Lets each process of a test be a machine of its own, with a name, a disk and remembered look-ups."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_smartinfinity.common import machine
from tests.helpers.runif import NO_MOUNTS
from tests.helpers.waiting import LIMIT

_NEW_MOUNTS = 0x20000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_SINGLE_PATH = (
    "access", "chmod", "listdir", "lstat", "open", "readlink", "rmdir", "scandir", "stat", "statvfs", "unlink", "utime"
)  # fmt: skip
_MAKING = ("mkdir", "rename", "replace", "link", "symlink")


def become_node(number: int, *, scratch: Path, node_rank: int | None = None, local_rank: int = 0) -> None:
    """Give this process, which has one thread, the identity of a machine of this number.

    Args:
        number: Number of the machine.
        scratch: Folder of the test, where identities lie.
        node_rank: Number of the machine in this training, if it is another one.
        local_rank: Number of the process on its machine.
    """
    os.environ |= {"NODE_RANK": str(number if node_rank is None else node_rank), "LOCAL_RANK": str(local_rank)}
    identity = scratch / f"boot-{number}-{os.getpid()}"
    identity.write_text(f"boot of machine {number}\n")
    machine._BOOT_ID = identity
    platform.node = lambda: f"node{number}"


def mount_own(folder: Path, over: Path) -> None:
    """Let this process, which has one thread, see one folder in the place of another, as its machine's own disk.

    Raises:
        OSError: This user may not.
    """
    library = ctypes.CDLL(None, use_errno=True)
    for call in (
        lambda: library.unshare(_NEW_MOUNTS),
        lambda: library.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None),
        lambda: library.mount(bytes(folder), bytes(over), None, ctypes.c_ulong(_BIND), None),
    ):
        if call():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def why_no_mounts(scratch: Path) -> str | None:
    """Return why a process cannot have mounts of its own here; None if it can."""
    for name in ("own", "over"):
        (scratch / name).mkdir()
    child = os.fork()
    if child == 0:
        try:
            mount_own(scratch / "own", scratch / "over")
        except OSError:
            os._exit(1)
        os._exit(0)
    return NO_MOUNTS if os.waitpid(child, 0)[1] else None


@contextmanager
def bindfs(folder: Path, over: Path) -> Iterator[None]:
    """Mount a folder over another one, so that who looks there remembers for a second what was there."""
    subprocess.run(["bindfs", str(folder), str(over)], check=True, timeout=LIMIT)
    try:
        yield
    finally:
        subprocess.run(["fusermount", "-uz", str(over)], check=True, timeout=LIMIT)


class RememberedLookups:
    """Lets this process remember for some time that a path was not there, as network file systems do.

    What another process makes under that path stays invisible meanwhile. What this process makes, it sees. Where the
    process sleeps to wait for it, time passes a hundred times as fast.

    Args:
        root: Top of the network file system.
        seconds: How long a failed look-up is remembered.
    """

    def __init__(self, root: Path, *, seconds: float) -> None:
        self._root = str(root)
        self._seconds = seconds
        self._absent: dict[str, float] = {}
        self._lstat = os.lstat
        self._skipped = 0.0
        time.sleep = self._sleeping(time.sleep)  # type: ignore[assignment]
        for name in _SINGLE_PATH:
            setattr(os, name, self._looking(getattr(os, name)))
        for name in _MAKING:
            setattr(os, name, self._making(getattr(os, name), first=name == "mkdir"))
        builtins.open = io.open = self._looking(io.open)  # type: ignore[assignment]

    def _sleeping(self, call: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            self._skipped += 99 * seconds
            call(seconds)

        return sleep

    def _now(self) -> float:
        return time.monotonic() + self._skipped

    def _looking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            name = self._name_of(path, kwargs)
            if name is None:
                return call(path, *args, **kwargs)
            if _creates(args, kwargs):
                self._refuse(os.path.dirname(name))
                self._forget(name)
            else:
                self._refuse(name)
            try:
                return call(path, *args, **kwargs)
            except FileNotFoundError:
                self._remember(name)
                raise

        return look

    def _making(self, call: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
        def make(source: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._name_of(source if first else args[0], kwargs)
            if name is not None:
                self._refuse(os.path.dirname(name))
            try:
                return call(source, *args, **kwargs)
            finally:  # the system asks anew after it was told that something is there
                if name is not None:
                    self._forget(name)

        return make

    def _name_of(self, path: Any, kwargs: dict[str, Any]) -> str | None:
        if isinstance(path, int) or any(value is not None for key, value in kwargs.items() if "dir_fd" in key):
            return None
        name = os.path.abspath(os.fsdecode(path))
        return name if name.startswith(self._root + os.sep) else None

    def _refuse(self, name: str) -> None:
        now = self._now()
        while len(name) > len(self._root):
            if self._absent.get(name, 0) > now:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            name = os.path.dirname(name)

    def _remember(self, name: str) -> None:
        """Remember the first part of a path that is not there."""
        parts = Path(name).relative_to(self._root).parts
        path = self._root
        for part in parts:
            path = os.path.join(path, part)
            try:
                self._lstat(path)
            except FileNotFoundError:
                self._absent[path] = self._now() + self._seconds
                return

    def _forget(self, name: str) -> None:
        self._absent = {path: until for path, until in self._absent.items() if path != name}


def _creates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    mode = args[0] if args else kwargs.get("flags", kwargs.get("mode", 0))
    return (
        bool(mode & os.O_CREAT) if isinstance(mode, int) else isinstance(mode, str) and set(mode) & set("wxa") != set()
    )
