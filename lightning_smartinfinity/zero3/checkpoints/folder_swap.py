"""Saving a folder next to the one it replaces, and swapping them when it is whole.

``path`` holds a subfolder (DeepSpeed's tag) with everything that matters, and small files beside it that are alike in
every save. A new ``path`` is written under a hidden name beside it and renamed. In a ``path`` that exists, only the
subfolder is exchanged, by one system call; whatever else lies in ``path`` stays. A process killed at any moment leaves
the old save or the new one; what it had begun is removed by the next save to ``path``.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.collectives import raising_together

__all__ = ["beside", "exchange", "replacing", "restore_interrupted"]

_INSIDE = ".saving"
_PREVIOUS = "previous"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


@contextmanager
def replacing(path: str | Path, tag: str, *, local_rank: int) -> Iterator[Path]:
    """A folder to save into instead of ``path``, which it becomes when the body ends; if it raises, nothing changes.

    Collective. The processes of one node must see the same file system; on nodes that do not see the one of global rank
    zero, local rank zero does there what global rank zero does elsewhere.

    Args:
        path: Where the save shall be in the end.
        tag: The subfolder that holds everything that matters.
        local_rank: Of this process on its node.

    Raises:
        CheckpointError: The folder cannot be made or put in place; on every rank.
    """
    target, inside = Path(os.path.realpath(path)), False
    with raising_together(), _io_errors(path):
        inside = target.exists()
    staging = target / _INSIDE if inside else beside(target)
    leads = dist.get_rank() == 0
    with raising_together(), _io_errors(path):
        if local_rank == 0:
            _prepare(target, tag)
    with raising_together(), _io_errors(path):
        if leads:
            staging.mkdir(parents=True)
    # Made by global rank zero, unless this node does not see its file system.
    leads = leads or (local_rank == 0 and not staging.exists())
    try:
        yield staging
    except BaseException:
        if leads:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    with raising_together(), _io_errors(path):
        if leads:
            _put_in_place(staging, target, tag, inside=inside)


def restore_interrupted(path: str | Path, tag: str) -> None:
    """Undo a swap that was interrupted between its two renames, where there is no exchange by one call.

    Any number of processes may call it at once.

    Args:
        path: As given to :func:`replacing`.
        tag: The subfolder.
    """
    target = Path(os.path.realpath(path))
    previous = target / _INSIDE / _PREVIOUS
    if previous.exists() and not (target / tag).exists():
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(previous, target / tag)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders by one system call; False where the file system or the C library has none."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def beside(target: Path) -> Path:
    """Where what becomes ``target`` when it is whole is written."""
    # Without the target's name: Lightning takes every entry of a folder that has "last" in its name for a checkpoint.
    return target.with_name(f"{_INSIDE}-{hashlib.sha256(target.name.encode()).hexdigest()[:16]}")


def _prepare(target: Path, tag: str) -> None:
    """Remove what a killed save to the same path left."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(
            f"{target} is a file; checkpoints of this strategy are folders.", "Remove it or save to another path."
        )
    restore_interrupted(target, tag)
    for leftover in (target / _INSIDE, beside(target)):
        shutil.rmtree(leftover, ignore_errors=True)


def _put_in_place(staging: Path, target: Path, tag: str, *, inside: bool) -> None:
    _flush_folder(staging / tag)
    _flush_folder(staging)
    if not inside:
        os.rename(staging, target)
        _flush_folder(target.parent)
        return
    if not (target / tag).exists():
        os.rename(staging / tag, target / tag)
    elif not exchange(staging / tag, target / tag):
        os.rename(target / tag, staging / _PREVIOUS)
        os.rename(staging / tag, target / tag)
    _flush_folder(target)
    for file in staging.iterdir():
        if file.name not in (tag, _PREVIOUS):
            os.replace(file, target / file.name)
    _flush_folder(target)
    shutil.rmtree(staging, ignore_errors=True)  # the save is complete; the next one tries again


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _io_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error}.", "Check the folder, or save to another one."
        ) from error
