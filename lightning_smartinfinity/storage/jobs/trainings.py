"""Groups the parts that all ranks have found into trainings, and determines the condition of each training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from pathlib import Path

from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE
from lightning_smartinfinity.storage.state.parts import Part, ResumePoint

__all__ = ["Condition", "Training", "jobs_beside", "movers_of", "trainings_in"]


class Condition(Enum):
    """Condition of a training that has left its parts on storage."""

    RESUMABLE = auto()
    """It has taken a step, and all of its parts were found."""

    TORN = auto()
    """It may have taken a step, and parts of it are missing, for example because a drive is not mounted."""

    DAMAGED = auto()
    """All of its parts were found. It may have taken a step, but damage to a manifest or record hides which."""

    NO_STEP = auto()
    """It holds nothing that is worth resuming."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The parts of one training that all ranks together have found.

    Args:
        parts: The parts, at least one.
        condition: Condition of the training.
        point: The newest point that is common to all ranks whose first part was found; None if there is none.
        missing: Rank and index of the storage folder of a missing part, or None.
    """

    parts: tuple[Part, ...]
    condition: Condition
    point: ResumePoint | None
    missing: tuple[int, int] | None

    def lost_storage(self, now: Sequence[Sequence[Path]] = ()) -> list[str]:
        """Return the storage folders on this machine that lack a part of it; none if another machine may have the part.

        Args:
            now: For each rank of the training that begins or resumes, its storage folders, as absolute paths. They name
                the folders of a rank of which no part was found, if its folders are its own (``{local_rank}``).

        Returns:
            The folders for a message: quoted paths, or a description of a folder whose path is unknown.
        """
        first, num_found = self.parts[0], len({part.rank for part in self.parts})
        if self.missing is None or (first.num_machines != 1 and num_found < first.world_size):
            return []
        folders_of, present = self._folders_of(now), {_place_of(part, first) for part in self.parts}
        places = ((rank, device) for rank, folders in folders_of.items() for device in range(len(folders)))
        lost = [repr(folders_of[rank][device]) for rank, device in places if (rank, device) not in present]
        return list(dict.fromkeys(lost if self.missing[0] in folders_of else [*lost, self.missing_storage(now)]))

    def missing_storage(self, now: Sequence[Sequence[Path]] = ()) -> str:
        """Return the storage folder of the missing part. Argument and form are those of :meth:`lost_storage`."""
        assert self.missing is not None
        rank, device = self.missing
        folders = self._folders_of(now).get(rank)
        return f"the storage folder of rank {rank}" if folders is None else repr(folders[device])

    def _folders_of(self, now: Sequence[Sequence[Path]]) -> dict[int, tuple[str, ...]]:
        """Return the storage folders of each rank of which they are known."""
        first, found = self.parts[0], {part.rank: part.folders for part in self.parts if part.store is not None}
        for part in self.parts:
            if str(part.storage) in first.folders:  # a part without a readable manifest: the ranks share their folders
                found.setdefault(part.rank, first.folders)
        as_now = {rank: tuple(map(str, folders)) for rank, folders in enumerate(now[: first.world_size])}
        common = found.keys() & as_now.keys()
        if not common or any(found[rank] != as_now[rank] for rank in common):  # other settings
            return found
        present = {str(part.storage) for part in self.parts}
        return {**{rank: folders for rank, folders in as_now.items() if present.isdisjoint(folders)}, **found}

    def belongs_to(self, now: Sequence[Sequence[Path]]) -> bool:
        """Return whether a resume in these storage folders, given for each rank, may continue it.

        If not, it is a training of other folders, and its drive is mounted in the place of one of these: no manifest of
        it names any of them, and no part is in the folder that its rank and device have now.
        """
        named = {folder for part in self.parts for folder in part.folders}
        places = {(rank, device, path) for rank, folders in enumerate(now) for device, path in enumerate(folders)}
        return (
            not named
            or not named.isdisjoint(str(path) for _, _, path in places)
            or any((part.rank, part.device, part.storage) in places for part in self.parts)
        )

    @property
    def step(self) -> int:
        """Step after which it was interrupted; 0 before the first step, or if unknown."""
        return 0 if self.point is None or self.point.number == 0 else self.point.step

    @property
    def newest_step(self) -> int | None:
        """Newest step that a readable record of any part names; None if there is no such record."""
        return max((point.step for part in self.parts for point in part.points), default=None)

    def parts_in(self, job: str) -> list[Part]:
        """Return its parts in a job."""
        return [part for part in self.parts if part.job == job]


def jobs_beside(job: str) -> list[str]:
    """Return the jobs that may hold parts of a job's training: itself, and those that parts are moved to or from."""
    return [job, f"{job}{ARCHIVE}", *([job.removesuffix(ARCHIVE)] if job.endswith(ARCHIVE) and job != ARCHIVE else [])]


def trainings_in(parts: Iterable[Part], job: str, other: str | None = None) -> list[Training]:
    """Return the trainings that have parts in a job; parts that are missing there are looked up in ``other``.

    A part without a readable manifest is assigned to the training whose missing part was in that folder. The remaining
    damaged ones count as one training.
    """
    everything = list(parts)
    unreadable = [part for part in everything if part.store is None and part.is_damaged]
    found = []
    for store in dict.fromkeys(part.store for part in everything if part.job == job and part.store is not None):
        of_store = [part for part in everything if part.store == store]
        training = _training_of(of_store, unreadable, everything, jobs=(job,))
        if training.condition is Condition.TORN:
            training = _training_of(of_store, unreadable, everything, jobs=(job, other))
        found.append(training)
    known = {part for training in found for part in training.parts}
    rest = tuple(part for part in unreadable if part.job == job and part not in known)
    if rest:
        found.append(Training(parts=rest, condition=Condition.DAMAGED, point=None, missing=None))
    return found


def _training_of(
    of_store: Sequence[Part], unreadable: Sequence[Part], around: Collection[Part], *, jobs: Collection[str | None]
) -> Training:
    readable = [part for part in of_store if part.job in jobs]
    points = [part.points for part in readable if part.device == 0]
    point = max(frozenset.intersection(*points), default=None) if points else None
    nothing_saved = bool(points) and (point is None or point.number == 0)
    are_apart = nothing_saved and point is None and all(points)  # as after a backup of one rank was put back
    lost = [part for part in unreadable if part.job in jobs]
    if not nothing_saved and len(readable) == len(of_store):  # else the missing part is in the other job
        lost += [part for part in around if _may_lack_manifest(part, readable[0].job)]
    parts = [*readable, *_in_place_of_missing(readable, lost)]
    missing = next(_missing(parts), None)
    hides_steps = are_apart or (nothing_saved and any(part.is_damaged for part in parts))
    if (nothing_saved and not hides_steps) or (missing is not None and _is_gone(*missing, parts, around)):
        condition = Condition.NO_STEP
    elif missing is not None:
        condition = Condition.TORN
    else:
        condition = Condition.DAMAGED if hides_steps or len(parts) > len(readable) else Condition.RESUMABLE
    return Training(parts=tuple(parts), condition=condition, point=point, missing=missing)


def _may_lack_manifest(part: Part, job: str) -> bool:
    """Return whether a part holds files without a manifest, which may have been lost."""
    return part.job == job and part.store is None and part.num_bytes > 0 and not (part.is_damaged or part.in_use)


def _in_place_of_missing(readable: Sequence[Part], unreadable: Iterable[Part]) -> Iterator[Part]:
    """Yield the unreadable parts in the places of missing ones; in a first folder, only those that are damaged."""
    first, present = readable[0], {(part.rank, part.device) for part in readable}
    for part in unreadable:
        place = _place_of(part, first)
        if place is None or place in present or part.rank >= first.world_size:
            continue
        if part.is_damaged or place[1] > 0:
            yield part


def _place_of(part: Part, first: Part) -> tuple[int, int] | None:
    """Return rank and device of a part; if its manifest is unreadable, its device by the folders of ``first``."""
    if part.store is not None:
        return part.rank, part.device
    storage = str(part.storage)
    if len(first.folders) == 1 and first.num_machines == 1:  # each rank may have a folder of its own
        return part.rank, 0
    return (part.rank, first.folders.index(storage)) if storage in first.folders else None


def _missing(parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """Yield rank and device of each missing part: not a list, since a manifest may name billions of ranks."""
    present = {_place_of(part, parts[0]) for part in parts}
    devices = range(len(parts[0].folders))
    return (place for place in product(range(parts[0].world_size), devices) if place not in present)


def _is_gone(rank: int, device: int, parts: Sequence[Part], around: Collection[Part]) -> bool:
    """Return whether a missing part was certainly replaced or removed, so that the rest can never be resumed.

    Another training's store at its path is no proof, because another drive may be mounted there. It is one if a further
    part in the same storage folder shows that the drive is the right one. A first folder without a manifest is a proof,
    too: a kill has interrupted a removal, which deletes manifests first.

    It is False for a training on several machines: the part's machine is unknown, and all may have the same paths.
    """
    storage, machine, jobs = Path(parts[0].folders[device]), parts[0].machine, {part.job for part in parts}
    at_its_path = [
        part
        for part in around
        if (part.rank, part.machine, part.storage) == (rank, machine, storage) and part.job in jobs
    ]
    is_same_drive = any(part.storage == storage for part in parts)
    is_replaced = is_same_drive and any(str(storage) in part.folders for part in at_its_path)
    is_removed = device == 0 and any(part.store is None for part in at_its_path)
    return parts[0].num_machines == 1 and (is_replaced or is_removed)


def movers_of(seen: Sequence[Sequence[Part]]) -> dict[Part, int]:
    """Return each part once, with the rank responsible for it: its own rank if that found it, else the first to do."""
    movers: dict[object, tuple[int, Part]] = {}
    for rank, parts in enumerate(seen):
        for part in parts:
            key = (part.store, part.rank, part.device, part.job) if part.store else (part.machine, part.path)
            if key not in movers or part.rank == rank:
                movers[key] = rank, part
    return {part: rank for rank, part in movers.values()}
