"""Plans the move of interrupted trainings out of the way of a new one, each with all parts in all storage folders.

All ranks look for parts (:func:`~.parts.find_parts`), gather what each has found, and compute the same plan from it
(:func:`plan_archiving`). Then they lock the parts (:meth:`~.mover.Mover.claim`). Only if all locks succeed, they
delete what was archived before, all manifests first, and move. A kill in between leaves each part in one of the two
jobs: the next start completes the move, and a training that resumes puts the parts together
(:func:`plan_putting_together`).

A training that resumes on another number of ranks is archived, too (:func:`plan_making_way`), while the stores of its
*successor* are filled from it. Its parts then name the successor. Once the successor is complete, the parts are
deleted. After a kill before that, the incomplete successor is deleted and the parts are moved back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.storage.folders.open_folder import ARCHIVE
from lightning_smartinfinity.storage.folders.rank_folder import rank_folder_path
from lightning_smartinfinity.storage.jobs.trainings import Condition, Training, jobs_beside, movers_of, trainings_in
from lightning_smartinfinity.storage.state.parts import Part

__all__ = ["Plan", "plan_making_way", "plan_putting_together", "plan_archiving"]


_MAY_HAVE_STEPS = (Condition.RESUMABLE, Condition.DAMAGED)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parts to move and to delete, each with the rank that does it.

    Args:
        job: The job that parts are moved to.
        moved: Parts to move, those of trainings that lack a part first.
        deleted: Parts to delete first, which are replaced or useless.
        left: Parts that stay, in addition to those of the new training.
        archives: Whether parts are archived. If not, a training that resumes puts its parts together.
        successor: Job id of the stores that are filled from what is archived; None if there are none.
        step: Step after which the training was interrupted.
        replaced: Step after which the replaced training was interrupted; None if no resumable training is replaced.
        replaces_damaged: Whether what is replaced could not be resumed, because it was damaged or lacked a part.
        is_damaged: Whether nothing can be resumed from what is archived, because manifests or records are damaged.
        lost_storage: Storage folders with missing parts of what is archived, without which it cannot be resumed, as in
            :meth:`~.trainings.Training.lost_storage`.
    """

    job: str
    moved: tuple[tuple[int, Part], ...] = ()
    deleted: tuple[tuple[int, Part], ...] = ()
    left: tuple[tuple[int, Part], ...] = ()
    archives: bool = True
    successor: bytes | None = None
    step: int = 0
    replaced: int | None = None
    replaces_damaged: bool = False
    is_damaged: bool = False
    lost_storage: tuple[str, ...] = ()

    def moved_by(self, rank: int) -> list[Part]:
        """Return the parts that a rank moves."""
        return [part for mover, part in self.moved if mover == rank]

    def deleted_by(self, rank: int) -> list[Part]:
        """Return the parts that a rank deletes."""
        return [part for mover, part in self.deleted if mover == rank]

    def left_to(self, rank: int) -> list[Part]:
        """Return the parts that stay, of those that a rank is responsible for."""
        return [part for mover, part in self.left if mover == rank]

    @property
    def changes_something(self) -> bool:
        """Whether anything is moved or deleted."""
        return bool(self.moved or self.deleted)

    @property
    def storage(self) -> list[Path]:
        """The storage folders that parts are moved in."""
        return list(dict.fromkeys(part.storage for _, part in self.moved))


def plan_archiving(seen: Sequence[Sequence[Part]], *, job: str, folders: Sequence[Sequence[Path]]) -> Plan:
    """Plan the move of interrupted trainings to the job ``<job>.aside`` before a new training begins.

    Args:
        seen: For each rank, the parts that it found of the job and of ``<job>.aside``.
        job: ``TransferConfig.job`` of the new training.
        folders: For each rank of the new training, the storage folders, as absolute paths.

    Raises:
        StorageError: A store in the way, or archived before, is marked ``keep``; a training was resumed from what was
            archived before; another machine may have a part of the training to move; or a training that is damaged, or
            lacks a part, would replace one that can be resumed, or be replaced by one of fewer steps.
    """
    movers = movers_of(seen)
    archive, of_job = f"{job}{ARCHIVE}", {part: rank for part, rank in movers.items() if part.job == job}
    in_own_folder = {part for part, rank in of_job.items() if part.storage in folders[rank]}
    in_the_way = {part for part in in_own_folder if part.rank < len(folders)}
    _refuse_kept(in_the_way)
    moved: list[Training] = []
    for training in trainings_in(movers, job, archive):
        begun = len(training.parts_in(job)) < len(training.parts)  # a kill interrupted the move
        if in_the_way.intersection(training.parts) or (begun and training.condition in _MAY_HAVE_STEPS):
            if training.condition is Condition.TORN and not training.lost_storage(folders):
                raise _torn(training, job, folders)
            if training.condition is not Condition.NO_STEP:
                moved.append(training)
    whole = {part for training in moved for part in training.parts}
    # The rest is of ranks that no longer exist, or that ran on another machine. Other ranks replace their own parts.
    rest = {part for part, rank in of_job.items() if part not in in_own_folder or part.rank != rank} - whole
    useless = _useless(movers, job, archive)
    unused = tuple((movers[part], part) for part in movers if part in rest and part in useless)
    left = tuple((movers[part], part) for part in movers if part in rest and part not in useless)
    if not moved:
        return Plan(job=archive, deleted=unused, left=left)
    moved.sort(key=lambda training: training.condition is not Condition.TORN)
    deleted, replaced = _replaced(movers, archive, moved)
    is_damaged = all(training.condition is Condition.DAMAGED for training in moved)
    if replaced is not None and not any(training.condition is Condition.RESUMABLE for training in moved):
        raise _useless_beside_resumable(moved[0], job, folders)
    return Plan(
        job=archive,
        moved=tuple(dict.fromkeys((movers[part], part) for training in moved for part in training.parts_in(job))),
        deleted=(*deleted, *unused),
        left=left,
        step=max(training.step for training in moved),
        replaced=replaced,
        replaces_damaged=bool(deleted) and replaced is None,
        is_damaged=is_damaged,
        lost_storage=tuple(dict.fromkeys(storage for training in moved for storage in training.lost_storage(folders))),
    )


def plan_making_way(seen: Sequence[Sequence[Part]], *, job: str, training: Training, successor: bytes) -> Plan:
    """Plan the move of a training to ``<job>.aside``, so that it resumes in new stores for another number of ranks.

    Args:
        seen: For each rank, the parts that it found of the job and of ``<job>.aside``.
        job: ``TransferConfig.job`` of the training.
        training: The training, whose parts are all in that job.
        successor: Job id of the new stores, which are filled from the training's.

    Raises:
        StorageError: What was archived before is marked ``keep``, a training was resumed from it, or it is damaged, or
            lacks a part, and may have more steps.
    """
    movers, archive = movers_of(seen), f"{job}{ARCHIVE}"
    deleted, replaced = _replaced(movers, archive, [training])
    return Plan(
        job=archive,
        moved=tuple((movers[part], part) for part in training.parts),
        deleted=deleted,
        successor=successor,
        step=training.step,
        replaced=replaced,
    )


def _replaced(
    movers: Mapping[Part, int], archive: str, moved: Sequence[Training]
) -> tuple[tuple[tuple[int, Part], ...], int | None]:
    """Return the parts archived before, to be deleted, and the step after which their training was interrupted."""
    whole = {part for training in moved for part in training.parts}
    before = [part for part in movers if part.job == archive and part not in whole]
    _refuse_kept(before)
    replaced = trainings_in(before, archive)
    for training in replaced:
        _require_replaceable(training, moved)
    resumable = (one.step for one in replaced if one.condition is Condition.RESUMABLE)
    return tuple((movers[part], part) for part in before), max(resumable, default=None)


def plan_putting_together(seen: Sequence[Sequence[Part]], *, job: str) -> Plan:
    """Plan which parts of a training that resumes move to its job from the other jobs of :func:`jobs_beside`.

    Args:
        seen: For each rank, the parts that it found of :func:`jobs_beside`.
        job: ``TransferConfig.job`` of the training that resumes.

    Raises:
        StorageError: The job has no training to resume, but one of the other jobs has; or the training is archived
            there and cannot be resumed.
    """
    movers = movers_of(seen)
    plan = _plan_of_migration(movers, job)
    if plan is not None:
        return plan
    can_resume, successors = False, {part.successor for part in movers}
    moved: list[Part] = []
    for other in jobs_beside(job)[1:]:
        for training in trainings_in(movers, job, other):
            can_resume = can_resume or (training.point is not None and training.missing is None)
            # Of a training that lacks a part, the error of opening it names that part.
            can_resume = can_resume or (
                training.condition is Condition.TORN and training.parts[0].store not in successors
            )
            if training.condition is Condition.RESUMABLE:
                moved += training.parts_in(other)
    for other in jobs_beside(job)[1:]:
        for training in trainings_in(movers, other, job):
            if training.condition is Condition.RESUMABLE and not can_resume:
                raise _in_other_job(training, job, other, movers)
    return Plan(job=job, moved=tuple((movers[part], part) for part in moved), archives=False)


def _plan_of_migration(movers: Mapping[Part, int], job: str) -> Plan | None:
    """Return the plan that ends a change of the number of ranks; None if there is none to end.

    If the successor is complete, the plan deletes the stores that it was filled from. If a kill came before that, the
    plan deletes the successor and moves those stores back.

    Raises:
        StorageError: The successor is incomplete, and so are those stores, or they are damaged.
    """
    archive = f"{job}{ARCHIVE}"
    for successor in dict.fromkeys(part.successor for part in movers if part.job == archive and part.successor):
        sources = [part for part in movers if part.job == archive and part.successor == successor]
        filled = (one for one in trainings_in(movers, job) if one.parts[0].store == successor)
        if any(one.condition is Condition.RESUMABLE for one in filled):
            return Plan(job=job, deleted=tuple((movers[part], part) for part in sources), archives=False)
        archived = [one for one in trainings_in(movers, archive, job) if not set(sources).isdisjoint(one.parts)]
        whole = (one for one in archived if one.condition is Condition.RESUMABLE)
        source = next((one for one in whole if set(sources) <= set(one.parts)), None)
        if source is None:
            _refuse_broken(archived, archive)
            continue
        rest = [part for part in movers if part.job == job and part not in source.parts]
        if all(part.store == successor or _is_nobodys(part) for part in rest):
            return Plan(
                job=job,
                deleted=tuple((movers[part], part) for part in rest),
                moved=tuple((movers[part], part) for part in source.parts_in(archive)),
                archives=False,
            )
    return None


def _is_nobodys(part: Part) -> bool:
    """Return whether a part certainly holds no state: it has no manifest, and no process uses it."""
    return not (part.store or part.is_damaged or part.kept or part.in_use)


def _useless(parts: Iterable[Part], job: str, archive: str) -> set[Part]:
    """Return the parts of a job that cannot be resumed from, are not marked ``keep``, and are not in use."""
    everything = list(parts)
    saves_nothing = {part for part in everything if part.job == job and _is_nobodys(part)}
    for training in trainings_in(everything, job, archive):
        if training.condition is Condition.NO_STEP:
            saves_nothing.update(training.parts_in(job))
    return {part for part in saves_nothing if not part.kept and not part.in_use}


def _refuse_kept(parts: Iterable[Part]) -> None:
    for part in parts:
        if part.kept:
            raise StorageError(
                f"{str(part.path)!r} holds the optimizer state of an earlier job that asked to keep it.",
                "Remove that folder if it is no longer needed, or choose another TransferConfig(job=...).",
            )


def _require_replaceable(training: Training, moved: Sequence[Training]) -> None:
    """Check that no training was resumed from what was archived before, and that it is not worth a repair.

    What is damaged or lacks a part may be the work of many steps: only a training that has more replaces it.
    """
    gone_on = [part for part in training.parts if not part.is_archived]
    if gone_on and training.condition is not Condition.NO_STEP:
        job = gone_on[0].job
        raise StorageError(
            f"{str(gone_on[0].path)!r} holds a training that was resumed there and interrupted again"
            f"{_after(training.step)}. It is not replaced by the one in the job {job.removesuffix(ARCHIVE)!r}, which "
            "would be archived there. If it was not resumed, its lock was damaged.",
            f"Resume it with {user_calls().from_storage} and transfer={{'job': {job!r}}}, or remove it, with "
            f"{_removal(training, job)}, or choose another TransferConfig(job=...).",
        )
    if training.condition in (Condition.TORN, Condition.DAMAGED):
        last = max(moved, key=lambda one: one.step)
        if training.newest_step is None or last.step <= training.newest_step:
            raise _may_be_newer(training, last)


def _in_other_job(training: Training, job: str, other: str, parts: Iterable[Part]) -> StorageError:
    damaged = next((part for part in parts if part.job == job and part.is_damaged), None)
    one = f"There is no training to resume in the job {job!r}. One"
    if damaged is not None:
        one = f"The training in {str(damaged.path)!r} cannot be resumed: its manifest or records are damaged. Another"
    return StorageError(
        f"{one} that was interrupted after step {training.step} is in the job {other!r}.",
        f"To resume {'it' if damaged is None else 'that one'}, pass transfer={{'job': {other!r}}}.",
    )


def _refuse_broken(trainings: Iterable[Training], archive: str) -> None:
    """Raise StorageError if one of these trainings, archived to move to another number of ranks, cannot be resumed."""
    for training in trainings:
        if training.condition in (Condition.DAMAGED, Condition.TORN):
            lost = training.missing_storage() if training.missing is not None else None
            why = "its manifest or records are damaged" if lost is None else f"its part in {lost} cannot be found"
            raise StorageError(
                f"{str(training.parts[0].path)!r} holds a training that was interrupted{_after(training.step)}, and "
                f"again while it was moved to another number of processes. It cannot be resumed, because {why}.",
                f"{'Resume' if lost is None else f'Mount {lost}, or resume'} from a checkpoint with another "
                f"TransferConfig(job=...). To remove what is left of it, run: {_removal(training, archive)}.",
            )


def _torn(training: Training, job: str, now: Sequence[Sequence[Path]]) -> StorageError:
    assert training.missing is not None
    lost, part = training.missing_storage(now), rank_folder_path(Path(), job=job, rank=training.missing[0])
    return StorageError(
        f"{str(training.parts[0].path)!r} holds a part of a training that was interrupted{_after(training.step)}. It "
        f"is archived as a whole or not at all, and its part {str(part)!r} in {lost} cannot be found.",
        f"Mount {lost}, or begin where all of its parts can be reached; or remove the rest with "
        f"{_removal(training, job)}, or choose another TransferConfig(job=...).",
    )


def _useless_beside_resumable(training: Training, job: str, now: Sequence[Sequence[Path]]) -> StorageError:
    return StorageError(
        f"{str(training.parts[0].path)!r} holds an interrupted training {_defect(training, now)}. It is "
        f"not deleted, and it does not replace the training in the job {job + ARCHIVE!r}, which can be resumed.",
        f"Remove one of them, with {_removal(training, job)} or {_removal(training, job + ARCHIVE)}, or choose another "
        "TransferConfig(job=...).",
    )


def _may_be_newer(training: Training, moved: Training) -> StorageError:
    archive, unknown = training.parts[0].job, " after an unknown step"
    job, known = archive.removesuffix(ARCHIVE), _after(training.newest_step or 0)
    back = "If its files can be repaired, do so"
    if training.missing is not None:
        back = f"If its drive is only not mounted, mount {training.missing_storage()}"
    resumes = user_calls().from_storage
    other = f"Or resume the one in the job {job!r}, with {resumes}. " if moved.condition is Condition.RESUMABLE else ""
    return StorageError(
        f"{str(training.parts[0].path)!r} holds a training that was interrupted"
        f"{known or unknown}, {_defect(training)}. It is not deleted for the one in the job {job!r}, which was "
        f"interrupted{_after(moved.step) or unknown} and would be archived in its place.",
        f"{back}, and resume it with {resumes} and transfer={{'job': {archive!r}}}. {other}Or remove one of "
        f"them, with {_removal(moved, job)} or {_removal(training, archive)}, or choose another "
        "TransferConfig(job=...).",
    )


def _defect(training: Training, now: Sequence[Sequence[Path]] = ()) -> str:
    lost = ", ".join(training.lost_storage(now))
    if training.missing is not None and not lost:
        lost = training.missing_storage(now)
    return f"which lacks its part in {lost}" if lost else "whose manifest or records are damaged"


def _after(step: int) -> str:
    return f" after step {step}" if step else ""


def _removal(training: Training, job: str) -> str:
    storage = dict.fromkeys(str(part.storage) for part in training.parts)
    return f"smart-infinity jobs {' '.join(storage)} --remove {job}"
