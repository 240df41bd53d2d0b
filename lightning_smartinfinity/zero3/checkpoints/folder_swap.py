"""Saves a folder beside the one that it replaces, and swaps them when it is complete.

``path`` holds a subfolder (DeepSpeed's tag) with everything that matters, and small files beside it that are the same
in every save. A new ``path`` is written under a hidden name beside it and renamed. In a ``path`` that exists, only the
subfolder is exchanged, by one system call; whatever else lies in ``path`` stays, and what lies in the subfolder but is
not DeepSpeed's is linked into the new one before. A kill or a power loss at any moment leaves the old save or the new
one; the next save to ``path`` removes the partial files of the one that was ended. After the call the new save is on
the device. One process, or one group of ranks, saves to a path at a time.
"""

from __future__ import annotations

import errno
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.checks import shown
from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
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
    StagingLock,
    is_in_use,
    locked,
    mark_of,
    remove_content,
    remove_leftover,
)
from lightning_smartinfinity.zero3.collectives import gather, raising_together
from lightning_smartinfinity.zero3.file_systems import first_seen, places_of

__all__ = ["FILES_BESIDE", "LATEST", "Staging", "remove_interrupted", "replacing", "restore_interrupted", "writing"]

LATEST = "latest"
"""Name of DeepSpeed's file that holds the tag."""

FILES_BESIDE = (LATEST, "zero_to_fp32.py", "zero_to_torch.py")
"""Names of DeepSpeed's files beside the subfolder. They are replaced by every save."""

_STAGING = ".saving"
_NEW = "new"
_GLANCE, _MOST_GLANCES = 0.05, 200  # ten seconds, for two system calls
_OF_DEEPSPEED = ("*mp_rank_[0-9]*_states.pt",)


class Staging(NamedTuple):
    """Where a save is written.

    Args:
        folder: The folder that becomes the save.
        leads: Whether this rank writes what each file system has once.
    """

    folder: Path
    leads: bool


@contextmanager
def replacing(path: str | Path, tag: str, *, closing_group: ProcessGroup | None = None) -> Iterator[Staging]:
    """Yield a folder to save into, which becomes ``path`` when the body ends; if the body raises, nothing changes.

    This is a collective. One rank on each file system makes the folder and puts it in place: machines need not see
    the same files under the path, and may remember for some time that something was not there.

    Args:
        path: Final path of the save.
        tag: The subfolder that holds everything that matters.
        closing_group: Process group in which the ranks agree at the end, if another thread leaves the context.

    Raises:
        CheckpointError: The folder cannot be created or put in place, or something lies where it is to be written that
            this package did not make; raised on every rank.
        StorageLockedError: Another process is saving to the same path; raised on every rank.
        StorageTimeoutError: The disk does not answer; raised on every rank.
    """
    if Path(tag).name != tag or tag in ("", ".."):
        raise CheckpointError(f"The tag {shown(tag)} is not the name of a folder.", "Pass a tag without slashes.")
    name = gather(uuid.uuid4().hex, None)[0]  # of a file that nobody has looked for
    target, lock = Path(path), StagingLock()
    made: tuple[Path, Path] | None = None
    with writing(path):
        (place,) = places_of([target])
    leads = place.leader == dist.get_rank()
    with ExitStack() as leading:
        with raising_together(), writing(path):
            if leads:
                target = unless_idle(partial(_resolved, path), doing="Looking at", path=target)
                lock, staging = leading.enter_context(_staged(path, target, tag, name))
                made = target, staging
        made = gather(made, None)[place.leader]
        assert made is not None
        with raising_together(), writing(path):
            here = unless_idle(partial(_as_here, path, *made), doing="Looking at", path=target)
            there = [made[1] / name, here / name]
            seen = first_seen(there, shared=place.num_machines > 1)
            if seen is None:
                raise CheckpointError(
                    f"The folder {made[1]}, in which {path} is being saved, is not seen on {platform.node()}.",
                    "Save to a path that is the same on all machines which mount the file system, or let it remember "
                    "for less than a minute what was not there (acdirmax of NFS).",
                )
            staging = seen.parent
        new = staging / _NEW
        yield Staging(new, leads)
        with raising_together(closing_group), writing(path):
            if leads and staging.parent == target:
                link = partial(_link_others, target / tag, new / tag)
                unless_idle(link, doing="Linking what is kept of", path=target / tag)
        with raising_together(closing_group), writing(path):
            if place.is_first_here:
                flush_tree(new)  # on every machine: what it has written to a shared file system is in its own memory
        with raising_together(closing_group), _swapping(path):
            if leads:
                lock.leaves_content = staging.parent == target  # it may hold what the path held before
                put = partial(_put_in_place, staging, target, tag, name)
                unless_idle(put, doing="Replacing", path=target)
                lock.leaves_content = False


def restore_interrupted(path: str | Path, tag: str) -> None:
    """Roll back a swap that was interrupted between its two renames, on systems that cannot exchange in one call.

    Any number of processes may call it at once. It waits for one that is just between them.

    Args:
        path: Path as given to :func:`replacing`.
        tag: The subfolder.
    """
    target = Path(os.path.realpath(path))
    for _ in range(_MOST_GLANCES):
        if os.path.lexists(target / tag):
            return
        if not is_in_use(target / _STAGING):
            _put_back(target, tag)
            return
        time.sleep(_GLANCE)


def remove_interrupted(path: str | Path, tag: str) -> None:
    """Remove what a killed process has left of its save to a path, as the next save to it does.

    What this package did not make stays, and so does what a live process uses.

    Args:
        path: Path as given to :func:`replacing`.
        tag: The subfolder.
    """
    target = _resolved(path)
    leftovers = (target / _STAGING, beside(target))
    with suppress(SmartInfinityError, OSError):
        if unless_idle(lambda: any(leftover.exists() for leftover in leftovers), doing="Looking at", path=target):
            with _staged(path, target, tag, uuid.uuid4().hex):
                pass


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn errors of the system, and torch's of a full disk, into a :class:`CheckpointError` about ``path``."""
    try:
        yield
    except SmartInfinityError:
        raise
    except Exception as error:  # torch reports a full disk as a RuntimeError, and the other ranks must hear of any
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {str(error) or type(error).__name__}.",
            "Free space there, check the folder, or save to another one. What the path held before is still whole.",
        ) from error


@contextmanager
def _swapping(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} was written, but could not be put in place: {error}.",
            "Look for the disk in the kernel log. The path holds the checkpoint of before or the new one, whole; if it "
            "has neither, loading it or saving to it puts the former back.",
        ) from error


@contextmanager
def _staged(path: str | Path, target: Path, tag: str, name: str) -> Iterator[tuple[StagingLock, Path]]:
    """Lock the folder in which a save is written, make in it what all ranks look for, and yield lock and folder."""
    while True:
        staging = unless_idle(partial(_staging_for, target, tag), doing="Looking at", path=target)
        with locked(staging, path) as lock:
            prepare = partial(_prepare, staging, target, tag, name)
            if unless_idle(prepare, doing="Preparing", path=target):
                yield lock, staging
                return


def _as_here(path: str | Path, target: Path, staging: Path) -> Path:
    """Return the path of the leader's staging folder where links lead to another mount point on this machine."""
    return Path(os.path.normpath(_resolved(path) / os.path.relpath(staging, target)))


def _resolved(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _staging_for(target: Path, tag: str) -> Path:
    """Return the folder in which a save is written, after refusing what the save could not replace."""
    if not target.exists():
        return beside(target)
    for folder in (target, target / tag):
        if os.path.lexists(folder) and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is a file; checkpoints of this strategy are folders.", "Remove it or save to another path."
            )
    for file in (target / name for name in FILES_BESIDE):
        if file.is_dir():
            raise CheckpointError(f"{file} is a folder, and a file is saved there.", "Remove it or save elsewhere.")
    _mark_leftover(target / _STAGING)
    return target / _STAGING


def _mark_leftover(staging: Path) -> None:
    """Mark what two processes left that saved to one path with older versions, if it has files of checkpoints only."""
    if not staging.is_symlink() and staging.is_dir() and os.listdir(staging) == [_NEW]:
        entries = [staging / _NEW, *(staging / _NEW).rglob("*")]
        if not any(entry.is_symlink() or not (entry.is_dir() or _is_of_a_save(entry.name)) for entry in entries):
            mark_of(staging).touch()


def _is_of_a_save(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (*_OF_DEEPSPEED, *FILES_BESIDE, NOTE_NAME))


def _prepare(staging: Path, target: Path, tag: str, name: str) -> bool:
    """Make what is written into a locked folder; return False if another process has made or removed the target."""
    if staging != _staging_for(target, tag):
        return False
    _put_back(target, tag)
    remove_content(staging)
    if staging.parent == target:
        remove_leftover(beside(target))
    (staging / _NEW).mkdir()
    (staging / name).touch()
    return True


def _link_others(old: Path, new: Path) -> None:
    if old.exists():
        link_others(old, new, replaced=_OF_DEEPSPEED)


def _put_back(target: Path, tag: str) -> None:
    put_back(target / _STAGING / _NEW, target / tag)


def _put_in_place(staging: Path, target: Path, tag: str, name: str) -> None:
    new = staging / _NEW
    if not (staging / name).exists():
        raise FileNotFoundError(errno.ENOENT, "somebody has removed what was written", str(staging))
    if staging.parent == target:
        beside_tag = [entry.name for entry in new.iterdir() if entry.name != tag]
        try:
            put_in_place(new / tag, target / tag)
        except OSError:
            with suppress(OSError):
                put_back(new, target / tag)
            raise
        flush(target)
        for name in beside_tag:
            os.replace(new / name, target / name)
        flush_names(target / tag)
    else:
        os.rename(new, target)
        flush_names(target)
