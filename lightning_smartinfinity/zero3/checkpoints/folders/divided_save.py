"""Chooses the save to use when machines have parts of two saves under one path.

A machine that saves to its own disk swaps its part of the new save with its part of the old one. If the job is killed
when only some machines have swapped, the others still have the old part in place, and their complete new part in the
staging folder. After its swap, a machine keeps the old part in the staging folder until all machines have swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["SAVE_ID_NAME", "PartsHere", "are_divided", "common_save", "id_of", "time_of"]

SAVE_ID_NAME = "save_id"
"""Name of the file, next to the processes' files, with the random id of the save, the same on all machines."""


class PartsHere(NamedTuple):
    """The saves of which one machine has a part.

    Args:
        in_place: Id of the save whose part is at the path; None if unknown.
        beside: Id of the save whose part is in the staging folder: swapped out, or not yet swapped in; None if none.
        newer_beside: Whether the save in the staging folder is the newer one.
    """

    in_place: str | None
    beside: str | None
    newer_beside: bool


def id_of(folder: Path) -> str | None:
    """Return the id of the save in a folder; None if there is no save, or an older version wrote it."""
    with suppress(OSError):
        return (folder / SAVE_ID_NAME).read_text(errors="replace").strip() or None
    return None


def time_of(folder: Path) -> float:
    """Return when the id of a save was written, in seconds since the epoch; 0 if there is no id."""
    with suppress(OSError):
        return (folder / SAVE_ID_NAME).stat().st_mtime
    return 0.0


def are_divided(machines: Sequence[PartsHere]) -> bool:
    """Return whether machines have parts of different saves in place; if not, no part in a staging folder is needed."""
    return len({each.in_place for each in machines}) > 1


def common_save(machines: Sequence[PartsHere]) -> str | None:
    """Return the id of the newest save that is complete on all machines; None if they agree, or if there is none.

    A part in a staging folder is complete if some machine has put that save in place: by then all had written theirs.
    """
    if not are_divided(machines):
        return None
    in_place = {each.in_place for each in machines}
    common = in_place.intersection(*({each.in_place, each.beside} for each in machines)) - {None}
    first = machines[0]
    return max(common, key=lambda save: (save == first.beside) == first.newer_beside, default=None)
