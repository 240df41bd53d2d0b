"""Saves a folder beside the one that it replaces, and swaps them when it is complete.

``path`` holds a subfolder (DeepSpeed's tag) with everything that matters, and small files beside it that are the same
in every save. A new ``path`` is written under a hidden name beside it and renamed. In a ``path`` that exists, only the
subfolder is exchanged, by one system call; whatever else lies in ``path`` stays, and what lies in the subfolder but is
not DeepSpeed's is linked into the new one before. A kill or a power loss at any moment leaves the old save or the new
one; the next save to ``path`` removes the partial files of the one that was ended. After the call the new save is on
the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.store.replacement import (
    beside,
    flush,
    flush_names,
    flush_tree,
    link_others,
    put_back,
    put_in_place,
)
from lightning_smartinfinity.store.staging_folder import (
    make_staging,
    remove_staging,
    remove_staging_unless_idle,
    require_own_staging,
)
from lightning_smartinfinity.zero3.collectives import raising_together

__all__ = ["replacing", "restore_interrupted"]

_STAGING = ".saving"
_NEW = "new"
_OF_DEEPSPEED = ("*_states.pt",)


@contextmanager
def replacing(path: str | Path, tag: str, *, local_rank: int) -> Iterator[Path]:
    """Yield a folder to save into, which becomes ``path`` when the body ends; if the body raises, nothing changes.

    This is a collective. The processes of one node must see the same file system. On nodes that do not see the
    file system of global rank zero, local rank zero does what global rank zero does elsewhere.

    Args:
        path: Final path of the save.
        tag: The subfolder that holds everything that matters.
        local_rank: Rank of this process on its node.

    Raises:
        CheckpointError: The folder cannot be created or put in place, or something lies where it is to be written that
            this package did not make; raised on every rank.
        StorageTimeoutError: The disk does not answer; raised on every rank.
    """
    target, inside = Path(os.path.realpath(path)), False
    with raising_together(), _io_errors(path):
        inside = target.exists()
    staging = target / _STAGING if inside else beside(target)
    new = staging / _NEW
    leads = dist.get_rank() == 0
    with raising_together(), _io_errors(path):
        if local_rank == 0:
            unless_idle(partial(_prepare, target, tag, staging), doing="Preparing", path=target)
    with raising_together(), _io_errors(path):
        if leads:
            _make(staging)
    with raising_together(), _io_errors(path):
        # Global rank zero has made it, unless this node does not see its file system.
        if local_rank == 0 and not new.exists():
            leads = True
            _make(staging)
    try:
        yield new
    except BaseException:
        if leads:
            remove_staging_unless_idle(staging)
        raise
    with raising_together(), _io_errors(path):
        if leads and inside and (target / tag).exists():
            link = partial(link_others, target / tag, new / tag, replaced=_OF_DEEPSPEED)
            unless_idle(link, doing="Linking what is kept of", path=target / tag)
    with raising_together(), _io_errors(path):
        if local_rank == 0 and new.exists():
            flush_tree(new)  # on every node: what a node has written to a shared file system lies in its own memory
    with raising_together(), _io_errors(path):
        if leads:
            put = partial(_put_in_place, staging, target, tag, inside=inside)
            unless_idle(put, doing="Replacing", path=target)


def restore_interrupted(path: str | Path, tag: str) -> None:
    """Roll back a swap that was interrupted between its two renames, on systems that cannot exchange in one call.

    Any number of processes may call it at once.

    Args:
        path: Path as given to :func:`replacing`.
        tag: The subfolder.
    """
    target = Path(os.path.realpath(path))
    put_back(target / _STAGING / _NEW, target / tag)


def _prepare(target: Path, tag: str, staging: Path) -> None:
    """Refuse to remove what is not ours, and remove what a killed save to the same path left behind."""
    restore_interrupted(target, tag)
    for folder in (target, target / tag):
        if os.path.lexists(folder) and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is a file; checkpoints of this strategy are folders.", "Remove it or save to another path."
            )
    require_own_staging(staging)
    for leftover in {staging, beside(target)}:
        remove_staging(leftover)


def _make(staging: Path) -> None:
    make_staging(staging)
    (staging / _NEW).mkdir()


def _put_in_place(staging: Path, target: Path, tag: str, *, inside: bool) -> None:
    new = staging / _NEW
    if inside:
        beside_tag = [entry.name for entry in new.iterdir() if entry.name != tag]
        put_in_place(new / tag, target / tag)
        flush(target)
        for name in beside_tag:
            os.replace(new / name, target / name)
        flush_names(target / tag)
    else:
        os.rename(new, target)
        flush_names(target)
    remove_staging(staging)  # the save is complete; the next one removes what is left


@contextmanager
def _io_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error}.", "Check the folder, or save to another one."
        ) from error
