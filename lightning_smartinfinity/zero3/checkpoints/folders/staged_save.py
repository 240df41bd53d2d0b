"""Writes a save on one file system, and puts it in place.

A new path is written next to its final place; in an existing path, only the subfolder is replaced. Nothing here waits
for other ranks.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.folders.replacement import (
    beside,
    flush,
    flush_names,
    link_others,
    put_back,
    put_in_place,
)
from lightning_smartinfinity.storage.folders.staging_folder import (
    is_in_use,
    mark_of,
    remove_content,
    remove_leftover,
    rooms_in,
)
from lightning_smartinfinity.storage.io.files import bounded, resolved
from lightning_smartinfinity.zero3.checkpoints.folders.divided_save import SAVE_ID_NAME, PartsHere, id_of, time_of

__all__ = [
    "FILES_BESIDE",
    "LATEST",
    "OF_DEEPSPEED",
    "complete",
    "has_leftovers",
    "parts_at",
    "prepare",
    "put_common_in_place",
    "put_save_in_place",
    "restore_interrupted",
    "staging_for",
]

LATEST = "latest"
"""Name of DeepSpeed's file that holds the tag."""

FILES_BESIDE = (LATEST, "zero_to_fp32.py", "zero_to_torch.py")
"""Names of DeepSpeed's files next to the subfolder. Every save replaces them."""

_STAGING = ".saving"
_OLD_ROOM = "new"  # name of the room in older versions
_GLANCE, _MOST_GLANCES = 0.05, 200  # ten seconds, for two system calls
OF_DEEPSPEED = ("*mp_rank_[0-9]*_states.pt",)
"""Name patterns of DeepSpeed's files in the subfolder."""


@bounded("Looking at")
def has_leftovers(path: str | Path) -> bool:
    """Return whether a killed process may have left remains of a save to a path."""
    target = resolved(path)
    return (target / _STAGING).exists() or beside(target).exists()


def restore_interrupted(path: str | Path, tag: str) -> None:
    """Roll back a swap by two renames that was interrupted between them, when no folder had the tag's name.

    Not all systems can exchange folders in one call. Any number of processes may call this at once. It waits for a
    running process that is between the renames.

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


@bounded("Looking at")
def staging_for(target: Path, tag: str) -> Path:
    """Return the staging folder of a save; raise CheckpointError if an entry could not be replaced."""
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
    """Mark a staging folder left by two processes of older versions, if it has files of checkpoints only."""
    if not staging.is_symlink() and staging.is_dir() and os.listdir(staging) == [_OLD_ROOM]:
        entries = [staging / _OLD_ROOM, *(staging / _OLD_ROOM).rglob("*")]
        if not any(entry.is_symlink() or not (entry.is_dir() or _is_of_a_save(entry.name)) for entry in entries):
            mark_of(staging).touch()


def _is_of_a_save(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (*OF_DEEPSPEED, *FILES_BESIDE, NOTE_NAME))


def parts_at(staging: Path, target: Path, tag: str) -> PartsHere:
    """Return which saves have a part at the path and in staging, after undoing a swap interrupted between renames."""
    _put_back(target, tag)
    old, new = target / tag, _part_in(staging, tag)
    return PartsHere(id_of(old), id_of(new), time_of(new) > time_of(old))


def _part_in(staging: Path, tag: str) -> Path:
    """Return the newest part of a save in a staging folder, which need not exist."""
    return max((room / tag for room in rooms_in(staging)), key=time_of, default=staging / _OLD_ROOM / tag)


def put_common_in_place(common: str | None, staging: Path, target: Path, tag: str) -> None:
    """Put the part of the save that all machines must use in place, if there is one and another is in place."""
    if common is not None and id_of(target / tag) != common:
        part = _part_in(staging, tag)
        if staging.parent == target:
            put_in_place(part, target / tag)
            flush(target)
            flush_names(target / tag)
        else:
            _put_first_in_place(part.parent, target)
    if staging.parent == target:
        remove_leftover(beside(target))  # staging folder of the first save


def prepare(staging: Path, target: Path, tag: str, *, save_id: str, common: str | None) -> None:
    """Reset the staging folder and make the room, which every rank looks for."""
    if staging.parent == target:
        put_common_in_place(common, staging, target, tag)
    remove_content(staging)
    (staging / save_id).mkdir()


def complete(staging: Path, target: Path, tag: str, save_id: str) -> None:
    """Write the id into the new save, and link other files of the old save into it."""
    new, old = staging / save_id / tag, target / tag
    (new / SAVE_ID_NAME).write_text(save_id)
    if staging.parent == target and old.exists():
        link_others(old, new, replaced=OF_DEEPSPEED)


def _put_back(target: Path, tag: str) -> None:
    for room in rooms_in(target / _STAGING):
        put_back(room, target / tag)


def put_save_in_place(staging: Path, target: Path, tag: str, save_id: str) -> None:
    """Swap the new save with the old one; the old one is then in the staging folder."""
    new = staging / save_id
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
        _put_first_in_place(new, target)


def _put_first_in_place(room: Path, target: Path) -> None:
    os.rename(room, target)
    flush_names(target)
