"""Brings together the parts of trainings that processes have found, and says what can be done with each training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from pathlib import Path

from lightning_smartinfinity.store.open_folder import ASIDE
from lightning_smartinfinity.store.parts import Part, Point

__all__ = ["Condition", "Training", "jobs_beside", "movers_of", "trainings_in"]


class Condition(Enum):
    """Says what can be done with a training that has left its parts on storage."""

    RESUMABLE = auto()
    """It has taken a step, and all of its parts are there."""

    TORN = auto()
    """It may have taken a step, and parts of it are missing, which may be on a drive that is not mounted."""

    NO_STEP = auto()
    """There is nothing in it that resuming would save."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parts of one training, as all ranks together have seen them.

    Args:
        parts: The parts, at least one.
        condition: What can be done with it.
        point: The newest point that all ranks have whose first part is there; None if there is none.
        missing: Rank and number of the storage folder of a part that is missing, or None.
    """

    parts: tuple[Part, ...]
    condition: Condition
    point: Point | None
    missing: tuple[int, int] | None

    @property
    def step(self) -> int:
        """Step after which it was interrupted; 0 before the first, or if the parts do not tell."""
        return 0 if self.point is None or self.point.number == 0 else self.point.step

    def parts_in(self, job: str) -> list[Part]:
        """Return its parts in a job."""
        return [part for part in self.parts if part.job == job]


def jobs_beside(job: str) -> list[str]:
    """Return the names under which parts of a job's training may lie: its own, and where they are moved to or from."""
    return [job, f"{job}{ASIDE}", *([job.removesuffix(ASIDE)] if job.endswith(ASIDE) and job != ASIDE else [])]


def trainings_in(parts: Iterable[Part], job: str, other: str | None = None) -> list[Training]:
    """Return the trainings that have parts in a job; what is missing of one there is looked for in ``other``."""
    everything = list(parts)
    found = []
    for store in dict.fromkeys(part.store for part in everything if part.job == job and part.store is not None):
        of_store = [part for part in everything if part.store == store and part.job in (job, other)]
        training = _training([part for part in of_store if part.job == job], everything)
        found.append(training if training.condition is not Condition.TORN else _training(of_store, everything))
    return found


def _training(parts: Sequence[Part], around: Collection[Part]) -> Training:
    missing = next(_missing(parts), None)
    points = [part.points for part in parts if part.device == 0]
    point = max(frozenset.intersection(*points), default=None) if points else None
    nothing_saved = bool(points) and (point is None or point.number == 0)
    if nothing_saved or (missing is not None and _is_gone(*missing, parts, around)):
        condition = Condition.NO_STEP
    else:
        condition = Condition.RESUMABLE if missing is None else Condition.TORN
    return Training(parts=tuple(parts), condition=condition, point=point, missing=missing)


def _missing(parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """Yield rank and device of what a training lacks; a manifest may speak of billions of ranks."""
    present = {(part.rank, part.device) for part in parts}
    devices = range(len(parts[0].folders))
    return (place for place in product(range(parts[0].world_size), devices) if place not in present)


def _is_gone(rank: int, device: int, parts: Sequence[Part], around: Collection[Part]) -> bool:
    """Return whether something else lies where a missing part must have been.

    Of a training on several machines nobody knows which of them that was, and all may have disks of the same path.
    """
    storage, machine, jobs = Path(parts[0].folders[device]), parts[0].machine, {part.job for part in parts}
    return parts[0].num_machines == 1 and any(
        (part.rank, part.machine, part.storage) == (rank, machine, storage) and part.job in jobs for part in around
    )


def movers_of(seen: Sequence[Sequence[Part]]) -> dict[Part, int]:
    """Return each part that was seen, once, with the rank that looks after it: its own, or else the first to see it."""
    movers: dict[object, tuple[int, Part]] = {}
    for rank, parts in enumerate(seen):
        for part in parts:
            key = (part.store, part.rank, part.device, part.job) if part.store else (part.machine, part.path)
            if key not in movers or part.rank == rank:
                movers[key] = rank, part
    return {part: rank for rank, part in movers.values()}
