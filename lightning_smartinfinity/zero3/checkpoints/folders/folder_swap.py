"""Writes a save to a staging folder, and swaps it with the save that it replaces when it is complete.

``path`` holds a subfolder (DeepSpeed's tag) with all the data, and small files next to it that are the same in every
save. A new ``path`` is written under a hidden name next to it, and renamed. In an existing ``path``, only the subfolder
is exchanged, by one system call. Other entries of ``path`` stay. Entries of the old subfolder that are not DeepSpeed's
are first linked into the new one. A kill or a power loss at any moment leaves the old save or the new one; the next
save to ``path`` removes partial files. When the call returns, the new save is on the device. One process, or one group
of ranks, saves to a path at a time.

Machines that do not see the same files each swap their own part. They keep the replaced parts until all have swapped.
If the job is killed in between, the next load or save restores the save that all machines have
(:func:`put_one_in_place`).
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
from lightning_smartinfinity.settings.rules import shown
from lightning_smartinfinity.storage.folders.replacement import flush_tree
from lightning_smartinfinity.storage.folders.staging_folder import StagingLock, locked
from lightning_smartinfinity.storage.io.files import limited, resolved
from lightning_smartinfinity.zero3.checkpoints.folders.divided_save import PartsHere, are_divided, common_save
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import (
    complete,
    has_leftovers,
    parts_at,
    prepare,
    put_common_in_place,
    put_save_in_place,
    staging_for,
)
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.ranks.file_systems import FolderLocation, first_seen, places_of

__all__ = ["Staging", "put_one_in_place", "remove_interrupted", "replacing", "writing"]


class Staging(NamedTuple):
    """Where a save is written.

    Args:
        folder: The folder that becomes the save.
        leads: Whether this rank writes the files that exist once on each file system.
        save_id: Random id of the save, the same on all ranks.
    """

    folder: Path
    leads: bool
    save_id: str


@contextmanager
def replacing(path: str | Path, tag: str, *, closing_group: ProcessGroup | None = None) -> Iterator[Staging]:
    """Yield a folder to save into, which becomes ``path`` when the body ends; if the body raises, nothing changes.

    This is a collective. One rank on each file system creates the folder and puts it in place: machines need not see
    the same files under the path, and may cache for some time that a file does not exist.

    Args:
        path: Final path of the save.
        tag: The subfolder that holds all the data.
        closing_group: Process group in which the ranks agree at the end, if another thread leaves the context.

    Raises:
        CheckpointError: The folder cannot be created or put in place, or its place is taken by something that this
            package did not create; raised on every rank.
        StorageLockedError: Another process is saving to the same path; raised on every rank.
        StorageTimeoutError: The disk does not answer; raised on every rank.
    """
    if Path(tag).name != tag or tag in ("", ".."):
        raise CheckpointError(f"The tag {shown(tag)} is not the name of a folder.", "Pass a tag without slashes.")
    save_id = gather(uuid.uuid4().hex, None)[0]  # also names the room in the staging folder
    with ExitStack() as leading:
        led = _lead(path, tag, leading, errors=writing)
        new = _made_for_all(path, tag, led, save_id)
        yield Staging(new, led.leads, save_id)
        with raising_together(closing_group), writing(path):
            if led.leads:
                kept = led.target / tag
                limited("Linking what is kept of", kept, complete, led.staging, led.target, tag, save_id)
        with raising_together(closing_group), writing(path):
            if led.place.is_first_here:
                flush_tree(new)  # on every machine: each caches its own writes to a shared file system
        with raising_together(closing_group), _swapping(path):
            if led.leads:
                # After the swap the staging folder holds the old save, until all machines have swapped.
                led.lock.leaves_content = led.staging.parent == led.target
                limited("Replacing", led.target, put_save_in_place, led.staging, led.target, tag, save_id)
        led.lock.leaves_content = False


def put_one_in_place(path: str | Path, tag: str) -> None:
    """Put the parts of one save in place on all machines after a kill left those of two. Collective.

    Nothing changes if no save is complete on all machines. Parts that are no longer needed are removed.

    Args:
        path: Path as given to :func:`replacing`.
        tag: The subfolder.

    Raises:
        CheckpointError: A part cannot be put in place; raised on every rank.
        StorageLockedError: A process is saving to the same path; raised on every rank.
        StorageTimeoutError: The disk does not answer; raised on every rank.
    """
    with ExitStack() as leading:
        led = _lead(path, tag, leading, errors=_swapping)
        with raising_together(), _swapping(path):
            if led.leads:
                limited("Replacing", led.target, put_common_in_place, led.common, led.staging, led.target, tag)
        if led.common is not None:
            led.lock.leaves_content = False


def remove_interrupted(path: str | Path, tag: str) -> None:
    """Remove the remains of a killed process's save to a path, as far as possible. Collective.

    Files that this package did not create, or that a running process uses, stay.

    Args:
        path: Path as given to :func:`replacing`.
        tag: The subfolder.
    """
    found = False
    with suppress(SmartInfinityError):  # raised on all ranks alike
        (place,) = places_of([Path(path)])
        # Only the leader looks: a machine that caches the absence of a file would make its next save to the path wait.
        if place.leader == dist.get_rank():
            with suppress(SmartInfinityError, OSError):
                found = has_leftovers(path)
        if any(gather(found, None)):
            put_one_in_place(path, tag)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn other errors, such as the system's or torch's of a full disk, into a :class:`CheckpointError`."""
    try:
        yield
    except SmartInfinityError:
        raise
    except Exception as error:  # torch reports a full disk as a RuntimeError; every error must reach the other ranks
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
            "has neither, or machines have parts of both, loading it or saving to it puts one of them in place.",
        ) from error


class _Led(NamedTuple):
    """A rank's information about a path and, on a leader, the staging folder that it has locked.

    Args:
        place: The file system of the path.
        leads: Whether this rank is the leader there.
        target: The path; on a leader, with links resolved.
        staging: The folder in which a save is written; meaningful on leaders only.
        lock: Lock of the staging folder; meaningful on leaders only. It can keep the folder's content on release,
            because other machines may need that save.
        common: Id of the save that all machines must use, if they have parts of several.
    """

    place: FolderLocation
    leads: bool
    target: Path
    staging: Path
    lock: StagingLock
    common: str | None


def _lead(
    path: str | Path, tag: str, leading: ExitStack, *, errors: Callable[[str | Path], AbstractContextManager[None]]
) -> _Led:
    """Lock the staging folder, on one rank of each file system, and find out which saves have parts there."""
    target = staging = Path(path)
    lock, parts = StagingLock(), list[PartsHere]()
    with errors(path):
        (place,) = places_of([target])
    leads = place.leader == dist.get_rank()
    with raising_together(), errors(path):
        if leads:
            target = resolved(path)
            lock, staging = leading.enter_context(_staged(path, target, tag))
            lock.leaves_content = True  # it may hold a part of a save that other machines have in place
            parts = [limited("Looking at", target, parts_at, staging, target, tag)]
            lock.leaves_content = parts[0].beside is not None
    machines = list(chain.from_iterable(gather(parts, None)))
    lock.leaves_content &= are_divided(machines)
    return _Led(place, leads, target, staging, lock, common_save(machines))


def _made_for_all(path: str | Path, tag: str, led: _Led, save_id: str) -> Path:
    """Create the folder that becomes the save, and return its path on this machine."""
    made: tuple[Path, Path] | None = None
    with raising_together(), writing(path):
        if led.leads:
            made = led.target, led.staging
            limited("Preparing", led.target, prepare, led.staging, led.target, tag, save_id=save_id, common=led.common)
    led.lock.leaves_content = False
    made = gather(made, None)[led.place.leader]
    assert made is not None
    with raising_together(), writing(path):
        here = _as_here(path, *made)
        seen = first_seen([made[1] / save_id, here / save_id], shared=led.place.num_machines > 1)
        if seen is None:
            raise CheckpointError(
                f"The folder {made[1]}, in which {path} is being saved, is not seen on {platform.node()}.",
                "Save to a path that is the same on all machines which mount the file system, or let it remember for "
                "less than a minute what was not there (acdirmax of NFS).",
            )
    return seen


@contextmanager
def _staged(path: str | Path, target: Path, tag: str) -> Iterator[tuple[StagingLock, Path]]:
    """Lock the staging folder, and yield lock and folder."""
    while True:
        staging = staging_for(target, tag)
        with locked(staging, path) as lock:
            # Another process may have created or removed the target before the lock was taken.
            if staging == staging_for(target, tag):
                yield lock, staging
                return


def _as_here(path: str | Path, target: Path, staging: Path) -> Path:
    """Return this machine's path of the leader's staging folder: links may lead to another mount point here."""
    return Path(os.path.normpath(resolved(path) / os.path.relpath(staging, target)))
