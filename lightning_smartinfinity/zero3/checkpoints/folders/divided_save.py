"""Says which save all machines can go to that have parts of two saves under one path.

A machine that saves to a disk of its own swaps its part of the new save with that of the old one. If a kill comes when
some machines have done so, the others still have the old part in place, and their new part, whole, beside it. What a
machine has taken out lies where its new part was, until all have swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["SAVE_ID_NAME", "PartsHere", "are_divided", "common_save", "id_of", "time_of"]

SAVE_ID_NAME = "save_id"
"""Name of the file, beside those of the processes, that holds the random id of the save, the same on all machines."""


class PartsHere(NamedTuple):
    """The saves of which one machine has a part.

    Args:
        in_place: Id of the save whose part lies where it is loaded from; None if it is unknown.
        beside: Id of the one whose part was taken out, or was about to be put there; None if there is none.
        newer_beside: Whether the latter is the newer one.
    """

    in_place: str | None
    beside: str | None
    newer_beside: bool


def id_of(folder: Path) -> str | None:
    """Return the id of the save whose files lie in a folder; None if there is none, or an older version saved it."""
    with suppress(OSError):
        return (folder / SAVE_ID_NAME).read_text(errors="replace").strip() or None
    return None


def time_of(folder: Path) -> float:
    """Return when the id of a save was written, in seconds since the epoch; 0 if there is none."""
    with suppress(OSError):
        return (folder / SAVE_ID_NAME).stat().st_mtime
    return 0.0


def are_divided(machines: Sequence[PartsHere]) -> bool:
    """Return whether machines have parts of several saves in place. Otherwise none needs what lies beside."""
    return len({each.in_place for each in machines}) > 1


def common_save(machines: Sequence[PartsHere]) -> str | None:
    """Return the id of the newest save that all machines have whole, if they have parts of several saves in place.

    A part beside is known to be whole only if some machine has put that save in place: then all had written theirs.
    """
    if not are_divided(machines):
        return None
    in_place = {each.in_place for each in machines}
    common = in_place.intersection(*({each.in_place, each.beside} for each in machines)) - {None}
    first = machines[0]
    return max(common, key=lambda save: (save == first.beside) == first.newer_beside, default=None)
